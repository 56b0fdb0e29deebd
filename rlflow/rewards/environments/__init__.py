"""Run environments, which answer a model between its turns.

User code runs in processes that are killed at a call's deadline. If an episode fails, its score is missing,
never 0. The package parses environment names, reads a class from its file's text, and runs the processes with
the episodes. Sampling turn by turn is in `rlflow.execution.episodes`; the assignment of environments to roles
is in `rlflow.config.roles.environments`. Importing this package does not load torch, because worker processes
import it at their start.
"""
