"""Environments: what answers a model between its turns. User code runs in processes that are killed at a
call's deadline; an episode that fails has no score, never a score of 0.

Here: naming an environment, reading its class out of the file's text, the processes that hold episodes, with
a deadline for each call. Not here: sampling turn by turn (`rlflow.execution.episodes`), which role has which
environment (`rlflow.config.roles.environments`). Importing this package loads no torch: the worker processes
start through it.
"""
