"""Turn a flow into a graph, by calling the flow once with symbols instead of rows.

This package has the symbols that stand for batches and roles, the tracer that records their calls, and the
rules for legal flows. The type of the graph is in `rlflow.compiler.graph`. `rlflow.compiler.check` checks
variants of settings. `rlflow.compiler.passes` orders the nodes.
"""
