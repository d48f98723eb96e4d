"""The QueryNode: serves search and query from what it has consumed."""
