"""Real nodes that are killed, stopped and ended under clients whose histories are checked: `tidewal verify kills`."""
