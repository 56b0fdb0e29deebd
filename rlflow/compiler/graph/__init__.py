"""The graph of an algorithm, as frozen data: the nodes, columns, roles and state of one iteration.

This package defines the graph's types, a byte format and an identity, draws graphs as text, Mermaid, DOT, SVG
and JSON, and compares them. `rlflow.compiler.trace` makes graphs, while `rlflow.compiler.plan` and
`rlflow.compiler.scheduler` decide when nodes run.
"""
