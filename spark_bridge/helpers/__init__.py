"""What a driver may use beside the data source: a session, packs, progress, the latest rows."""
