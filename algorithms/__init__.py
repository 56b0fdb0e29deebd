"""Algorithms, one file each. A file contains settings, stages, losses and a flow.

From rlflow, a file imports only the public names (`from rlflow import …`). Arithmetic that several algorithms
share is in `rlflow.author.functional`. The other parts of `rlflow` run the algorithms.
"""
