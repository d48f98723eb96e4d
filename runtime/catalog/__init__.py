"""The catalog of a cluster: collections and channel owners, as the records of one channel say, and stored cuts."""
