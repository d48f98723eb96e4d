"""The log: the interface `Wal`, the records in its channels, their names and URLs."""
