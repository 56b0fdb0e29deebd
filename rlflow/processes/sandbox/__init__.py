"""Sandbox: environment variables, resource limits and kernel restrictions of a process with untrusted text.

A process applies Landlock, seccomp and limits to itself; a probe reports which of them work on this machine.
The choice of a sandbox for each process is in `rlflow.rewards.confinement` and `rlflow.data.chat`.
"""
