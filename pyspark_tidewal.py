"""Spark finds the data source `tidewal` through this module's name."""
