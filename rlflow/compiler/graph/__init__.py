"""The graph of an algorithm, as frozen data: nodes, columns, roles and state of one iteration.

This package has the graph's types, drawings as text, Mermaid, DOT, SVG and JSON, a byte format, an identity,
and the differences of two graphs. `rlflow.compiler.trace` makes graphs. `rlflow.compiler.plan` and
`rlflow.compiler.scheduler` decide when nodes run.
"""
