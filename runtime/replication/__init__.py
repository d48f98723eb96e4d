"""The continuous copy of a log into another one, which is read-only until it is promoted."""
