"""Turn a configuration and a graph into the roles of a run. Each role is bound once, in the same way for a
check, a plan, a run and a worker.

The package binds roles to folders, backends, settings and capabilities, makes their models, binds rewards to
roles, and opens the run's data. Flags are read in `rlflow.config`; runs are started in `rlflow.runs`;
sampling and training are in `rlflow.backends`.
"""
