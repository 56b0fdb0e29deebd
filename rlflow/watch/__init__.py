"""Watching a run: what it says while it goes, what it leaves for others to read, and what reads that."""
