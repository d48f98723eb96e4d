"""The driver's side of reading: which range of which channel each task reads. Imports no Spark."""
