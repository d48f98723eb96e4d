"""Writing: from a DataFrame's rows to a collection or to topics, each row exactly once."""
