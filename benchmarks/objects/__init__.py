"""What the log on object storage costs beside the bare store, and beside Woodpecker on the same store."""
