"""Pools of threads around the objects of a test."""

from contextlib import contextmanager

from rlflow.cluster.rpc import thread_pool


@contextmanager
def pool_of(*objects, name="all"):
    """Return a pool with one of the objects on each rank."""
    pool = thread_pool.thread_pool(name, len(objects))
    for member, one in zip(pool.actors, objects, strict=True):
        member.host.instance = one
    try:
        yield pool
    finally:
        thread_pool.close(pool)
