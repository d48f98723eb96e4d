"""Consumer groups on Pulsar: each group's state is folded from a topic of its own."""
