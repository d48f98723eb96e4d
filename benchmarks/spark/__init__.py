"""Spark through the bridge, beside sources that cost nothing and Spark's own."""
