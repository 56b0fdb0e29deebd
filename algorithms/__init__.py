"""Algorithms, one file each. A file contains settings, stages, losses and a flow, and imports only `rlflow`.

Arithmetic that several algorithms share is in `rlflow.author.functional`. The other parts of `rlflow` run the
algorithms.
"""
