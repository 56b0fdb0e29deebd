"""Checkpoints: the saved state of a run, with which it can continue. A crash at any moment leaves the last
intact checkpoint, and a damaged checkpoint is never loaded. No stored file is a pickle.

Here: writing, verifying, loading, exporting, the lock of a run's folder, files that are replaced atomically
(`rlflow.checkpoints.durable`). Not here: the content of a run's state and the time of saving
(`rlflow.runs.state`, `rlflow.runs.loop`).
"""
