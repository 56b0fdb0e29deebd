"""The place of a rank in its job: call ``here()`` in a method of the role's class."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rlflow.author.source_lines import call_place
from rlflow.errors import FlowError, Problem


@dataclass(frozen=True)
class Here:
    """A rank's place in its job. Ranks, local ranks and nodes are numbered from 0."""

    job: str
    role: str
    rank: int
    ranks: int  # ranks of the role
    local_rank: int  # number of this rank among the role's ranks on this node
    local_ranks: int  # ranks of the role on this node
    node: int  # number of the node, in the order of the role's ranks
    nodes: int  # nodes that have ranks of the role
    # rendezvous of the role's ranks for torch.distributed: a file, or HOST:PORT; empty for a role without a
    # torch group
    meeting: str = ""


_here: list[Here] = []


def here() -> Here:
    """Return the place of the rank that runs in this process.

    Raises FlowError if this process isn't a rank of a job.
    """
    if not _here:
        raise FlowError(
            Problem(
                "job-here",
                "here() was called outside of a job's ranks",
                call_place(),
                found="another process",
                expected="a method of a role's class, called by the job",
                remedy="call it within such a method",
            )
        )
    return _here[-1]


def settle(place: Here, distributed: bool) -> None:
    """Set the place that ``here()`` returns in this process.

    ``distributed``: whether to set torchrun's environment variables as well.
    """
    _here[:] = [place]
    if distributed:
        os.environ.update(
            RANK=str(place.rank),
            WORLD_SIZE=str(place.ranks),
            LOCAL_RANK=str(place.local_rank),
            LOCAL_WORLD_SIZE=str(place.local_ranks),
            GROUP_RANK=str(place.node),
        )
        host, colon, port = place.meeting.rpartition(":")
        if colon and not place.meeting.startswith("/"):
            os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
