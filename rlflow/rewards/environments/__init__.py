"""Run environments, which answer a model between its turns.

User code runs in worker processes. A process that misses a call's deadline is killed. If an episode fails,
its score is missing, never 0. The package parses environment names, reads an environment's class without
importing its file, and runs the processes with the episodes. Sampling turn by turn is in
`rlflow.execution.episodes`. The assignment of environments to roles is in `rlflow.config.roles.environments`.
Workers import this package at their start, so importing it does not load torch.
"""
