"""Runs environments, which answer a model between its turns.

User code runs in worker processes. A process that misses a call's deadline is killed. If an episode fails,
its score is missing, never 0. This package parses environment names, reads an environment's class without
importing its file, and runs the processes with the episodes. Sampling turn by turn is in
`rlflow.execution.episodes`, and the assignment of environments to roles in
`rlflow.config.roles.environments`. Workers import this package when they start, so importing it doesn't load
torch.
"""
