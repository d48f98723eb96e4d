"""RocksMQ, the embedded default: a journal of recycled segments indexed by RocksDB."""
