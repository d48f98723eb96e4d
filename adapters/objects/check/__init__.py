"""Checks of a log in a store: read all of it, and change nothing."""
