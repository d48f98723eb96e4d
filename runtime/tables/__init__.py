"""Tables of rows beside the log: what their readers and writers share."""
