"""Start workers as forks of one process that has already imported their modules.

Otherwise the imports would take seconds in each worker.

This package holds the fork server of this process, the requests to it, and the program that Ray starts in
place of a worker. The worker itself is in `rlflow.cluster.worker`. If a run uses several machines, Ray starts
workers in its usual way.
"""
