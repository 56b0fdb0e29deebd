"""Start Ray workers as forks of one process that has already imported their modules.

Otherwise, each worker spends seconds on its imports. This package contains the fork server, the requests sent
to it, and the program that Ray starts in place of a worker. In runs on several machines, Ray starts the
workers as usual.
"""
