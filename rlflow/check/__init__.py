"""Judging an algorithm before anything is started."""
