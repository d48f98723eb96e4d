"""What Tidewal costs, measured. Each script ends with one JSON line per figure; see README.md."""
