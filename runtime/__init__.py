"""The ground floor: clock, messages, codec, WAL interface, streams, actors, config, metrics and errors."""
