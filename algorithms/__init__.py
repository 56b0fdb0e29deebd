"""Algorithms, one file each. A file has settings, stages, losses and a flow; it imports only from `rlflow`.

These files contain the differences between algorithms. Arithmetic that several algorithms share is in
`rlflow.author.functional`. The code that runs them is elsewhere in `rlflow`.
"""
