"""Consumer groups: which member reads which channel, and how far each group has got. Adapters bring the storage."""
