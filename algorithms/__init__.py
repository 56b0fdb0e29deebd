"""Algorithms, one file each. A file has settings, stages, losses and a flow; it imports only from `rlflow`.

Each file contains what is specific to its algorithm. Arithmetic that several algorithms share is in
`rlflow.author.functional`. The code that runs algorithms is in other parts of `rlflow`.
"""
