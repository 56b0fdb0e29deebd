"""What an algorithm's file is written with: stages, losses, flows, `repeat`, settings and the verbs of roles.

Here: decorators, signatures, settings, where in a user's file something stands. Loads no torch. Not here:
turning a flow into a graph (`rlflow.compiler.trace`), calling it on real batches (`rlflow.execution.eager`).
"""
