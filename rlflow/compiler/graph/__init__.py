"""The graph of an algorithm, as frozen data: nodes, columns, roles and state of one iteration.

This package has the model, drawings as text, Mermaid, DOT and JSON, a byte format with an identity, and the
differences of two graphs. `rlflow.compiler.trace` makes graphs. `rlflow.compiler.plan` and
`rlflow.compiler.scheduler` decide when their nodes run.
"""
