"""The migration of what a log has to another log."""
