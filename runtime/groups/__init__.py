"""Consumer groups: who reads which channel, and how far each group has got. Adapters bring the storage."""
