"""Logs on real brokers, each beside the bare client of its broker."""
