"""A run's services: processes such as a retriever or a judge, which rewards and environments call over HTTP.

This package starts, supervises, restarts and ends them. See `rlflow.services.serving` for ready-made servers
and `rlflow.processes.clients` for their clients.
"""
