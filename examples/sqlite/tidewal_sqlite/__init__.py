"""A log in one SQLite file: a complete adapter of Tidewal in a package of its own."""
