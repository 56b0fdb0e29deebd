"""Start workers as forks of one process that has imported their modules.

The imports take seconds per worker otherwise.

This package holds the fork server of this process, the requests to it, and the program that Ray starts in
place of a worker. The worker itself is in `rlflow.cluster.worker`. Workers on several machines are started by
Ray as usual.
"""
