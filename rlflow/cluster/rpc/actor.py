"""The Ray actor around an object: runs its methods by name, in the threads of a concurrency group."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from rlflow import interfaces, own_lines
from rlflow.batch import Batch
from rlflow.cluster import group  # modules: Ray carries this class over with all that it names
from rlflow.cluster.health import heartbeat as pulse
from rlflow.cluster.rpc.sockets import listen
from rlflow.cluster.rpc.wire import pack, unpack
from rlflow.errors import RemoteError
from rlflow.execution.apply import ending
from rlflow.process import Process
from rlflow.watchdog import beside, kin
from rlflow.watchdog.stacks import show_stacks

Payload = NDArray[np.uint8]  # bytes that Ray hands over without a copy
_actor: Any = ray.remote  # its own types know neither actors' concurrency groups nor restarts

ERA = 8  # bytes of the era before each frame
CALLS = frozenset({"make", "do", "_run", "do_chunks", "do_batch"})  # methods of Host within which the object's own code runs
GROUPS = {"model": 1, "cpu": 2, "io": 4, "control": 2, "beat": 1}  # models of one worker share its cores: one at a time


@_actor(num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)
class Host:
    """Holds one object. Never restarted by Ray, which would lose its state silently."""

    held: Any = None
    era = 0
    watchdog: Any = None

    def make(self, kind: type, *args: Any) -> None:
        """Make the object. Not in the constructor: what that raises reaches nobody as it is."""
        kin.die_with(os.getppid())
        self.watchdog = beside.for_worker()
        with self._contained():
            self.held = kind(*args)

    def meet(self, wanted: str | None, insecure: bool) -> str:
        """On the first rank of a pool on several machines: where they meet. Raises PlanError as ``interfaces.chosen`` does."""
        return group.listen(own_interface(wanted, insecure))

    def present(self) -> pulse.ProcessInfo:
        """Who this is, for those who watch it."""
        return pulse.ProcessInfo(Process.this(), ray.get_runtime_context().get_node_id(), show_stacks())

    def beat(self) -> tuple[tuple[str, float], ...]:
        """That threads of this process run, and what is under way for how many seconds."""
        return pulse.MARKS.now()

    def enter(self, era: int) -> None:
        """Refuse from now on what was asked in earlier eras and has not begun: nobody waits for it, and state has gone back since."""
        self.era = era

    def do(self, era: int, method: str, *args: Any) -> Any:
        self._of_now(era, method)
        with pulse.MARKS.during(method), self._contained():
            return getattr(self.held, method)(*args)

    def do_run(self, *told: Any) -> Any:
        """What a frame tells, whose answer may be one. ``told``: the era and the frame as one, then transfers. Bytes alone, and as few
        arguments as can be, are what Ray hands over fastest, and a star what it compares arguments with fastest."""
        return self._run(told[0], *told[1:])

    def listen(self, key: bytes) -> str:
        """Take frames over lines too, from whoever has the key; the name under which."""
        return listen(key, self._run)

    def _run(self, told: bytes, *transfers: Any) -> Any:
        with self._contained():
            return self.held.run(self._frame(told, "run"), *transfers)

    def do_chunks(self, *told: Any) -> Iterator[Any]:
        """The same, with several answers, each as soon as it is there."""
        with self._contained():
            yield from self.held.run_chunks(self._frame(told[0], "run_chunks"), *told[1:])

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        """Of what is called inside nothing ends this process, and no child that it forks goes on as if it were this one."""
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

    def _frame(self, told: bytes, what: str) -> memoryview:
        """What stands behind the era."""
        self._of_now(int.from_bytes(told[:ERA], "little"), what)
        return memoryview(told)[ERA:]

    def _of_now(self, era: int, what: str) -> None:
        if era != self.era:
            raise RuntimeError(f"'{what}' was asked in era {era}, and it is era {self.era}")

    def do_batch(self, method: str, payload: Payload) -> Payload:
        """A method from batch to batch."""
        with pulse.MARKS.during(method), self._contained():
            return packed(getattr(self.held, method)(opened(payload)))


def own_interface(wanted: str | None, insecure: bool) -> interfaces.Interface:
    """The interface of this worker's machine; without a choice that of the route to the cluster's first machine."""
    head = ray.get_runtime_context().gcs_address.rpartition(":")[0].strip("[]")
    return interfaces.chosen(wanted, head, insecure)


def packed(batch: Batch) -> Payload:
    return np.frombuffer(pack(batch), np.uint8)


def opened(payload: Payload) -> Batch:
    """The batch, on the payload's own memory."""
    return unpack(payload.data)
