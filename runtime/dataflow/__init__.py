"""Windows, keyed state that lives in the log, and a join with a collection, for the members of consumer groups."""
