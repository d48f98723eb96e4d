"""Actors: one handler at a time, bounded mailboxes with lanes, supervision and restart."""
