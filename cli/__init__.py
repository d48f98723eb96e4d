"""The command line: thin commands over the floors below."""
