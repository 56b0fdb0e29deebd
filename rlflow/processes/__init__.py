"""Processes next to the run's own process: how a run starts, sandboxes, calls and ends them.

This package has the watchdog, the sandbox, HTTP requests to servers, deadlines, and network interfaces. It
also finds the user's lines in errors from other processes. The programs that these processes run are in
`rlflow.rewards`, `rlflow.services` and `rlflow.cluster`.
"""
