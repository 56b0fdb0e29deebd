"""Checkpoints: the saved states from which a run can continue.

If the process crashes, at whatever moment, the last intact checkpoint is still there. A damaged checkpoint is
never loaded. Checkpoints contain no pickles.

The package writes, verifies, loads and exports checkpoints. It also locks a run's folder and replaces files
atomically (`rlflow.checkpoints.durable`). `rlflow.runs.state` decides what goes into a checkpoint, and
`rlflow.runs.loop` decides when to save one.
"""
