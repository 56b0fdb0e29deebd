"""The parts of an algorithm's file: stages, losses, flows, `repeat`, settings and methods of roles.

This package has the decorators, reads signatures and settings, and finds source lines in a user's file.
Importing it does not import torch. `rlflow.compiler.trace` turns a flow into a graph.
`rlflow.execution.eager` runs a flow on real batches.
"""
