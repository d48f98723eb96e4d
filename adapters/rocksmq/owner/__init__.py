"""The owner of a directory: the log as the one process that writes it has it, and its server for the others."""
