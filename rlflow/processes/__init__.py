"""Processes that a run starts next to its own: starting, sandboxing, calling and ending them.

This package contains the watchdog, the sandbox, the HTTP client, deadlines and network interfaces. It also
finds the user's own lines in errors from other processes. The programs these processes run are in
`rlflow.rewards`, `rlflow.services` and `rlflow.cluster`.
"""
