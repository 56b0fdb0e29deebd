"""The graph of an algorithm, as frozen data: nodes, columns, roles and state of one iteration.

Here: the model, drawings as text, Mermaid, DOT and JSON, bytes with an identity, differences of two graphs.
Not here: how a graph comes about (`rlflow.compiler.trace`), and when its nodes run (`rlflow.compiler.plan`,
`rlflow.compiler.scheduler`).
"""
