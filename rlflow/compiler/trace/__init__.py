"""From a flow to a graph: symbols that stand for batches and roles, the tracer that records calls on them,
the rules of legal flows.

Here: everything that is found out by calling a flow once without rows. Not here: the graph itself
(`rlflow.compiler.graph`), judging variants of settings (`rlflow.compiler.check`), the order of nodes
(`rlflow.compiler.passes`).
"""
