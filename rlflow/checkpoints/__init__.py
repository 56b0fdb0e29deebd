"""Checkpoints: the saved states from which a run can continue.

A crash at any moment leaves the last intact checkpoint unchanged, and a damaged checkpoint is never loaded.
No file of a checkpoint is a pickle.

The package writes, verifies, loads and exports checkpoints. It also locks a run's folder, and replaces files
atomically (`rlflow.checkpoints.durable`). `rlflow.runs.state` decides what a checkpoint contains, and
`rlflow.runs.loop` decides when to save one.
"""
