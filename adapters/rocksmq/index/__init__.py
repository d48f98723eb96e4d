"""The index: where in the journal entries lie, kept in RocksDB and rebuilt from the journal at any time."""
