"""The parts of an algorithm's file: stages, losses, flows, `repeat`, settings and methods of roles.

This package has the decorators, reads signatures and settings, and finds places in a user's file. It does not
load torch. `rlflow.compiler.trace` turns a flow into a graph; `rlflow.execution.eager` calls it on real
batches.
"""
