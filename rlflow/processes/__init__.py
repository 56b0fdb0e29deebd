"""Manage processes outside a run's own: start them, sandbox them, send them requests, and end them.

The package has the watchdog, the sandbox, HTTP requests to servers, deadlines, network interfaces, and the
user's lines in errors of other processes. The processes themselves are defined in `rlflow.rewards`,
`rlflow.services` and `rlflow.cluster`.
"""
