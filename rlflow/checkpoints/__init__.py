"""Checkpoints: what a run needs to go on, written so that a crash at any moment leaves the last good one, and
read so that a damaged one is never taken for it. Nothing at rest is a pickle.

Here: writing, verifying, loading, exporting, the lock of a run's folder. Not here: what a run's state is and
when it is saved (`rlflow.runs.state`, `rlflow.runs.loop`), files written whole
(`rlflow.checkpoints.durable`).
"""
