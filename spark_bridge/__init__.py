"""The Spark bridge: a Python data source and sink over consistent cuts of the log."""
