"""Carrying out calls: the same operations for eager flows and for plans."""
