"""What the parts of a queue cost, each beside the same without it, with the goals; see README.md."""
