"""Servers of `rlflow serve`: a retriever, a judge and a runner of code over HTTP, in the forms that clients
of other projects send.

Here: those servers.
Not here: when they are started and ended (`rlflow.services`), and who asks them.
"""
