"""What clients asked and how it ended, and whether a log and its tables are as that says."""
