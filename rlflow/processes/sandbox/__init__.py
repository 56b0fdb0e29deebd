"""A sandbox for processes that handle untrusted text: environment variables, limits and restrictions.

A process restricts itself with Landlock, seccomp and resource limits. A probe finds out which of these work
on this machine. Which sandbox a process gets is decided in `rlflow.rewards.confinement` and
`rlflow.data.chat`.
"""
