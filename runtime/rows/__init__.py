"""Rows: the schema of a collection, the columns of its records, and which shard a key belongs to."""
