"""Consumer groups as groups of Kafka: its own protocol assigns the channels, and positions are committed offsets."""
