"""The command line, with one module for each group of commands.

Commands read their arguments, call the same functions as Python callers, print the results and return an exit
code. The actual work is done in `rlflow.runs`, `rlflow.compiler.check` and `rlflow.compiler.preview`. Runs
are displayed by `rlflow.monitoring`.
"""
