"""Requests and replies as messages: roles ask each other through ephemeral channels of the log, or another route."""
