"""Start Ray workers as forks of one process that has already imported their modules.

Without this, each worker needs seconds for its imports. This package holds the fork server, the requests to
it, and the program that Ray starts in place of a worker. If a run uses several machines, Ray starts the
workers in its usual way.
"""
