"""Streams: readers of channels that give messages and time-ticked packs to their users."""
