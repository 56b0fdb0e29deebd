"""Services of a run: processes beside it that its rewards and environments ask over HTTP, such as a retriever
or a judge.

Here: how they are declared, and how they are started, watched, started anew and ended.
Not here: what they answer (`rlflow.services.serving` has servers for the usual ones), and who asks them.
"""
