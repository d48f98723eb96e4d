"""The log on object storage: blocks that are created and never changed, in a bucket or in a shared directory."""
