"""Services of a run: processes next to it, such as a retriever or a judge, that its rewards and environments
call over HTTP.

Here: starting, watching, restarting and ending services. Not here: the servers themselves
(`rlflow.services.serving` has the usual ones), and their clients.
"""
