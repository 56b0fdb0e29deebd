"""Turn a configuration and a graph into the roles of a run.

Checks, plans, runs and workers bind roles with the same code.

The package binds roles to folders, backends, settings and capabilities, makes their models, binds rewards to
roles, and opens the run's data. Flags are parsed in `rlflow.config`, runs are started in `rlflow.runs`, and
sampling and training are in `rlflow.backends`.
"""
