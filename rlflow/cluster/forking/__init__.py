"""Workers as forks of one process that has imported what they all import, which takes each of them seconds of
processor time otherwise.

Here: the fork server of this process, the requests to it, and the program that Ray starts in place of a
worker. Not here: what a worker does (`rlflow.cluster.worker`), workers on several machines (Ray starts them
as usual).
"""
