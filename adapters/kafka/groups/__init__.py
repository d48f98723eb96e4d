"""Consumer groups as groups of Kafka: its own protocol divides the channels, and positions are committed offsets."""
