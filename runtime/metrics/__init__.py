"""Metrics: the table of all of them, a node's registry, and the server of `/metrics` and `/healthz`."""
