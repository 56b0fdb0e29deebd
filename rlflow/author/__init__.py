"""What an algorithm's file is made of: stages, losses, flows, `repeat`, settings and the methods of roles.

This package defines the decorators, reads signatures and settings, and finds source lines in a user's file.
Importing it doesn't import torch. `rlflow.compiler.trace` turns a flow into a graph, and
`rlflow.execution.eager` runs it on real batches.
"""
