"""Settings: every one with its default, and how they are filled from file, environment and arguments."""
