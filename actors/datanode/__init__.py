"""The DataNode: consumes vchannels and flushes them to Delta Lake."""
