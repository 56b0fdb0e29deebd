"""Services of a run: processes such as a retriever or a judge, which rewards and environments call over HTTP.

This package starts, supervises, restarts and ends services. Common servers are in `rlflow.services.serving`.
The clients of servers are in `rlflow.processes.clients`.
"""
