"""Turn a configuration and a graph into the roles of a run.

Checks, plans, runs and workers all use this code. It binds each role to a model folder, backends, settings
and capabilities, loads the models, binds rewards to roles, and opens the run's data. Flags are parsed in
`rlflow.config`, runs are started in `rlflow.runs`, and sampling and training happen in `rlflow.backends`.
"""
