"""The tasks' side of reading: from ranges of channels and tables to Arrow batches. Imports no Spark."""
