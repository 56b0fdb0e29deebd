"""The command line: one module for each group of commands.

The modules read arguments, call the same functions as Python callers, print results and return exit codes.
The work of the commands is in `rlflow.runs`, `rlflow.compiler.check` and `rlflow.compiler.preview`. Displays
of a run are in `rlflow.monitoring`.
"""
