"""Links between processes: others write through the owner of a log, and hear of it what is acknowledged."""
