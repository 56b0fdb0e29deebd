"""What a configuration and a graph make of each role: bound once, and the same for a check, a plan, a run and
a worker.

Here: roles bound to folders, backends, settings and capabilities; models made of them; rewards by role; the
run's data. Not here: reading flags (`rlflow.config`), starting anything (`rlflow.runs`), sampling or training
(`rlflow.backends`).
"""
