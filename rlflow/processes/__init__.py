"""Manage processes next to the run's own process: start them, sandbox them, send them requests, and end them.

The package has the watchdog, the sandbox, HTTP requests to servers, deadlines, and network interfaces. It
also finds the user's lines in errors from other processes. The processes themselves are defined in
`rlflow.rewards`, `rlflow.services` and `rlflow.cluster`.
"""
