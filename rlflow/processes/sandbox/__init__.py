"""Sandbox for a process that handles untrusted text: environment variables, limits, and restrictions.

A process applies Landlock, seccomp and resource limits to itself. A probe reports which of them work on this
machine. `rlflow.rewards.confinement` and `rlflow.data.chat` choose the sandbox for each process.
"""
