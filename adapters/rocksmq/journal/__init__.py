"""The journal: segments of frames on disk, how they are written, read back after a crash, and retained."""
