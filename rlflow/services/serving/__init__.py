"""Servers of `rlflow serve`: a retriever, a reward and a code runner over HTTP.

They answer requests in the formats of other projects' clients. `rlflow.services` starts and ends them for a
run.
"""
