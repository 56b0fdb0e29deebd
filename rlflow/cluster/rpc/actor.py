"""Host: the Ray actor around a worker's object. It runs the object's methods by name, in the threads of a concurrency group."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import ray

from rlflow import interfaces, own_lines
from rlflow.cluster import group  # modules: Ray carries this class over with all that it names
from rlflow.cluster.health import heartbeat as pulse
from rlflow.cluster.rpc.parcels import Parcel, Post
from rlflow.cluster.rpc.shared_memory import SharedFrame
from rlflow.cluster.rpc.sockets import listen
from rlflow.cluster.sharding.gather import owned
from rlflow.errors import RemoteError
from rlflow.execution.apply import ending
from rlflow.process import Process
from rlflow.watchdog import beside, kin
from rlflow.watchdog.stacks import show_stacks

_actor: Any = ray.remote  # its own types know neither actors' concurrency groups nor restarts

ERA = 8  # bytes of the pool's era, which stand before each frame
CALLS = frozenset({"make", "do", "_run", "do_chunks", "do_batch"})  # methods of Host within which the object's own code runs
GROUPS = {"model": 1, "cpu": 2, "io": 4, "control": 2, "beat": 1}  # models of one worker share its cores: one at a time


@_actor(num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)
class Host:
    """Holds one object. Ray never restarts it, which would lose the object's state silently."""

    instance: Any = None
    era = 0
    post: Any = None  # made where it is first needed: Ray carries the class over
    watchdog: Any = None

    def make(self, kind: type, *args: Any) -> None:
        """Make the object. This is not done in the constructor, since Ray does not hand on an error of that as it is."""
        kin.die_with(os.getppid())
        self.watchdog = beside.for_worker()
        with self._contained():
            self.instance = kind(*args)

    def meet(self, name: str | None, insecure: bool) -> str:
        """Listen on the first rank of a pool on several machines. Gives the rendezvous address. Raises PlanError as ``interfaces.chosen``
        does."""
        return group.listen(own_interface(name, insecure))

    def present(self) -> pulse.ProcessInfo:
        """The process of this worker, for the health monitor."""
        return pulse.ProcessInfo(Process.this(), ray.get_runtime_context().get_node_id(), show_stacks())

    def beat(self) -> tuple[tuple[str, float], ...]:
        """A heartbeat: (activity, seconds) of each thread that is at work."""
        return pulse.MARKS.now()

    def enter(self, era: int) -> None:
        """Begin an era: from now on, calls of earlier eras that have not begun are refused. Nobody waits for them, and the state has been
        put back."""
        self.era = era

    def do(self, era: int, method: str, *args: Any) -> Any:
        """Call a method of the object. Raises RuntimeError for a call of an earlier era."""
        self._check_era(era, method)
        with pulse.MARKS.during(method), self._contained():
            return getattr(self.instance, method)(*args)

    def do_run(self, *parts: Any) -> Any:
        """Have the object ``run`` a frame. ``parts``: the frame with the era before it, then transfers. Ray is fastest with bytes alone,
        few arguments, and a signature with a star."""
        return self._run(parts[0], *parts[1:])

    def listen(self, key: bytes) -> str:
        """Take frames over sockets too, from a process that has the key. Gives the socket's name."""
        return listen(key, self._run)

    def _run(self, frame: bytes, *transfers: Any) -> Any:
        with self._contained():
            return self.instance.run(self._frame(frame, "run"), *transfers)

    def do_chunks(self, *parts: Any) -> Iterator[Any]:
        """Have the object ``run_chunks`` a frame. Gives several answers, each as soon as it has come."""
        with self._contained():
            yield from self.instance.run_chunks(self._frame(parts[0], "run_chunks"), *parts[1:])

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        """While inside, an exit becomes a RemoteError instead of ending this process, and a forked child exits instead of going on."""
        with self.watchdog.board.during("", 0, math.inf), kin.here_alone():
            try:
                yield
            except Exception as error:
                if (other := own_lines.portable(error)) is not error:
                    raise other from None
                raise
            except GeneratorExit:
                raise
            except BaseException as error:
                raise RemoteError(ending(error)) from None

    def _frame(self, frame: bytes, method: str) -> memoryview:
        """The frame without the era before it. Raises RuntimeError for one of an earlier era."""
        self._check_era(int.from_bytes(frame[:ERA], "little"), method)
        return memoryview(frame)[ERA:]

    def _check_era(self, era: int, method: str) -> None:
        if era != self.era:
            raise RuntimeError(f"'{method}' was asked in era {era}, and it is era {self.era}")

    def reaches(self, at: SharedFrame) -> bool:
        """Whether this process can read the shared memory of the one that asks."""
        return self._post().reaches(at)

    def _post(self) -> Post:
        self.post = self.post or Post()
        post: Post = self.post
        return post

    def do_batch(self, method: str, parcel: Parcel, shared: bool) -> Parcel:
        """Call a method from batch to batch. shared: whether whoever asks can read this process's shared memory."""
        with pulse.MARKS.during(method), self._contained():
            [batch] = self._post().opened([parcel])
            return self._post().parcel(getattr(self.instance, method)(owned(batch)), shared=shared)


def own_interface(name: str | None, insecure: bool) -> interfaces.Interface:
    """The network interface of this worker's machine: the one of this name, or else the one of the route to the cluster's first machine.
    Raises PlanError as ``interfaces.chosen`` does."""
    head = ray.get_runtime_context().gcs_address.rpartition(":")[0].strip("[]")
    return interfaces.chosen(name, head, insecure)
