"""Checks of a directory that no process has open: scrub the journal, and repair it."""
