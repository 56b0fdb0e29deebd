"""What a rank of a job knows of itself: ``here()`` in a method of its class."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rlflow.author.source_lines import call_place
from rlflow.errors import FlowError, Problem


@dataclass(frozen=True)
class Here:
    """The place of a rank. Ranks, local ranks and nodes are counted from 0."""

    job: str
    role: str
    rank: int
    ranks: int  # of the role
    local_rank: int  # among the role's ranks on this node
    local_ranks: int  # of the role on this node
    node: int  # in the order in which the role's ranks lie on nodes
    nodes: int  # on which ranks of the role lie
    # where the role's ranks meet for torch.distributed: a file, or HOST:PORT; empty for a role that is in no
    # group
    meeting: str = ""


_here: list[Here] = []


def here() -> Here:
    """The place of the rank in whose process this is called. Raises FlowError in any other process."""
    if not _here:
        raise FlowError(
            Problem(
                "job-here",
                "here() was called outside a rank of a job",
                call_place(),
                found="another process",
                expected="a method of a role's class, as the job calls it",
                remedy="call it within such a method",
            )
        )
    return _here[-1]


def settle(place: Here, distributed: bool) -> None:
    """Make ``place`` the place of this process; for a rank of torch's group also as libraries read it, in
    torchrun's variables."""
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
