"""The life of a run: it is prepared, started or resumed, iterates, recovers from lost workers, and ends.

This package also has the files of the run's folder, and compares the inputs of a resumed run with those at
its start. `rlflow.execution` executes nodes, `rlflow.checkpoints` has the checkpoint format, and
`rlflow.monitoring` has the displays.
"""
