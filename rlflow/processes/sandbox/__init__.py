"""Sandbox: environment variables, resource limits and kernel restrictions for a process that handles
untrusted text.

A process applies Landlock, seccomp and limits to itself. A probe reports which of them work on this machine.
`rlflow.rewards.confinement` and `rlflow.data.chat` choose the sandbox for each process.
"""
