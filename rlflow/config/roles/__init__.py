"""Turn a configuration and a graph into the roles of a run.

The same code binds roles for a check, a plan, a run and a worker.

The package binds roles to folders, backends, settings and capabilities, makes their models, binds rewards to
roles, and opens the run's data. Flags are parsed in `rlflow.config`; runs are started in `rlflow.runs`;
sampling and training are in `rlflow.backends`.
"""
