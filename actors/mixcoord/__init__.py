"""MixCoord: owns the catalog, assigns channels and collects watermarks into cuts."""
