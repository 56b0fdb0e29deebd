"""Turn a flow into a graph, by calling the flow once with symbols instead of rows.

This package has the symbols that stand for batches and roles, the tracer that records what is called on them,
and the rules for valid flows. The graph's type is in `rlflow.compiler.graph`. `rlflow.compiler.check` checks
variants of settings, and `rlflow.compiler.passes` orders the nodes.
"""
