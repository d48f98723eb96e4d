"""One WAL backend each, found through the entry-point group `tidewal.wal`."""
