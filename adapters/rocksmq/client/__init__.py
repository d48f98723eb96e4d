"""Clients: the log as a process has it that shares a directory with its owner."""
