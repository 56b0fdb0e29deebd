"""Servers of `rlflow serve`: a retriever, a reward and a code runner over HTTP, in the request formats of
other projects' clients.

Not here: starting and ending servers for a run (`rlflow.services`), and the servers' clients.
"""
