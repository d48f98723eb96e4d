"""One replicated state machine over a channel: follow, propose, await one's own record, snapshot, truncate."""
