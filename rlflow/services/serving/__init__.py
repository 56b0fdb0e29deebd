"""The servers of `rlflow serve`: a retriever, a reward and a code runner over HTTP.

They speak the formats that other projects' clients use. In a run, `rlflow.services` starts and ends them.
"""
