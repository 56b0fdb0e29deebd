"""A run: its directory, its loop over iterations, what it writes and what it says."""
