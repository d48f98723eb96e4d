"""Tidewal: a streaming runtime in which the log is the system."""
