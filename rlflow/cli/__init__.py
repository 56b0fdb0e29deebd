"""The command line: one module for each group of commands.

Here: reading words, calling what Python callers call too, printing, exit codes. Not here: what the commands
do (`rlflow.runs`, `rlflow.compiler.check`, `rlflow.compiler.preview`), and displays of a run
(`rlflow.monitoring`).
"""
