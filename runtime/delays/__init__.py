"""Messages that are due later: how they lie in a log until then, and what releases them."""
