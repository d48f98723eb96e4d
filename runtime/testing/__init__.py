"""The testing kit: memory WAL, virtual clock, seeded scheduler and fault plan."""
