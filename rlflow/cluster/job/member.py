"""A member of a job: one rank of a role in its own process, around the object of the user's class."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from ray import cloudpickle

from rlflow.author.batch import Batch
from rlflow.cluster.group import LOOPBACK, join
from rlflow.cluster.health.heartbeat import MARKS
from rlflow.cluster.job.here import Here, settle
from rlflow.cluster.rpc.actor import own_interface
from rlflow.cluster.rpc.parcels import Parcel, Post
from rlflow.cluster.sharding.gather import owned
from rlflow.errors import PlanError
from rlflow.extras import VERSION
from rlflow.monitoring.secrets import guard


@dataclass(frozen=True)
class Seat:
    """The message with which a rank is set up."""

    version: str  # of the driver's rlflow
    kind: bytes  # the pickled class
    arguments: Mapping[str, Any]  # of the class, by name
    place: Here  # its meeting is a name alone where the ranks are on several machines
    distributed: bool  # whether the rank joins torch's group of the role before the object is made
    device: str  # of that group: cuda or cpu
    threads: int  # of torch
    interface: str | None = None
    insecure: bool = False


class JobMember:
    """Makes the user's object and calls its methods. Calls of one rank run one at a time, in the order in which they were made."""

    def __init__(self, seat: Seat, address: str = "") -> None:
        """``address``: where ranks on several machines meet."""
        guard(sys.stdout, sys.stderr)  # which Ray keeps in files
        if seat.version != VERSION:
            raise PlanError.of("worker-version", "a rank has another rlflow than the driver", found=VERSION,
                               expected=seat.version, remedy="install the same version on every node")
        torch.set_num_threads(seat.threads)
        place = replace(seat.place, meeting=address or seat.place.meeting)
        settle(place, seat.distributed)
        if seat.distributed:
            interface = own_interface(seat.interface, seat.insecure) if address else LOOPBACK
            join(place.meeting, place.rank, place.ranks, seat.device, interface)
        self.post = Post()
        self.instance = cloudpickle.loads(seat.kind)(**seat.arguments)

    def invoke(self, method: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Call a method of the object."""
        with MARKS.during(method):
            return getattr(self.instance, method)(*args, **keywords)

    def on_rows(self, method: str, parcel: Parcel, shared: bool, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Parcel:
        """Call a method from batch to batch with some rows. ``shared``: whether whoever asks can read this process's shared memory. Raises
        TypeError where the method gives no batch."""
        with MARKS.during(method):
            [batch] = self.post.opened([parcel])
            answer = getattr(self.instance, method)(owned(batch), *args, **keywords)
        if not isinstance(answer, Batch):
            raise TypeError(f"'{method}' was called with rows and gave a {type(answer).__name__}, expected a Batch")
        return self.post.parcel(answer, shared=shared)

    def close(self) -> None:
        """Nothing is left to end here: the processes that the object has started end with this one."""
