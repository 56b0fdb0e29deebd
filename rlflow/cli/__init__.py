"""The command line: one module for each group of commands.

Here: reading arguments, calling the functions that Python callers use too, printing, exit codes. Not here:
the work of the commands (`rlflow.runs`, `rlflow.compiler.check`, `rlflow.compiler.preview`), and displays of
a run (`rlflow.monitoring`).
"""
