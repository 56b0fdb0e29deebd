"""Graphs on pools of Ray workers: how rows are split over ranks, and how batches travel between processes."""
