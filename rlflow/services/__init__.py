"""Services of a run: processes next to the run, such as a retriever or a judge, which its rewards and
environments call over HTTP.

Here: starting, watching, restarting and ending services. Not here: the servers themselves
(`rlflow.services.serving` has common ones), and their clients.
"""
