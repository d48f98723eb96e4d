"""Checks of a directory that no process has open: scrub the journal, and salvage what can be read of it."""
