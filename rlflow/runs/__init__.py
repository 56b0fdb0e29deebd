"""A run: its directory, its loop over iterations, what it writes and says, how it ends, and how it goes on.

Here: preparing, the loop, evaluation, recovery, resuming, what a run depends on. Not here: carrying out nodes
(`rlflow.execution`), the format of checkpoints (`rlflow.checkpoints`), displays (`rlflow.monitoring`).
"""
