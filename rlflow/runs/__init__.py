"""A run from start to end: preparing, starting or resuming it, iterating, and recovering from lost workers.

This package also writes the files in the run's folder, and compares a resumed run's inputs with those at its
start. See `rlflow.execution` for how nodes are executed, `rlflow.checkpoints` for the checkpoint format, and
`rlflow.monitoring` for displays.
"""
