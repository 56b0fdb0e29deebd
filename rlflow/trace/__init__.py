"""From a flow to a graph: symbols, the tracer, and the rules of legal flows."""
