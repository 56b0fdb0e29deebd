"""Processes beside a run's own: how they start, end with the run, are confined and are asked.

Here: the watchdog, the sandbox, questions to servers, deadlines, network interfaces, and the user's lines in
errors of other processes. Not here: which processes there are (`rlflow.rewards`, `rlflow.services`,
`rlflow.cluster`).
"""
