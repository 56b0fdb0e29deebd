"""Servers of `rlflow serve`: a retriever, a reward and a code runner over HTTP, in request formats of other
projects' clients.

Not here: starting and ending servers for a run (`rlflow.services`), and their clients.
"""
