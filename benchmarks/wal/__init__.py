"""What RocksMQ costs beside the disk's own limit: one subject per module, all in one run with interleaved rounds."""
