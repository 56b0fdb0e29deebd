"""Host: the part of a rank that's the same for every transport. It owns an object and runs its methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rlflow.cluster.health import heartbeat as pulse
from rlflow.cluster.rpc.row_messages import RowMailbox, RowMessage
from rlflow.cluster.rpc.shared_memory import SharedFrame
from rlflow.cluster.sharding.gather import owned
from rlflow.errors import RemoteError
from rlflow.execution.apply import ending
from rlflow.processes.user_frames import AS_THEY_ARE, in_worker, portable
from rlflow.processes.watchdog import process_tag

GENERATION_BYTES = 8  # bytes of the pool's generation number before each frame
# methods of Host that run the object's own code
CALLS = frozenset({"make", "do", "_run", "do_chunks", "do_batch"})


class Host:
    """Owns a rank's object, and runs the object's methods by name.

    Calls from an earlier generation of the pool are refused, because nobody is waiting for their answers.
    """

    instance: Any = None
    generation = 0
    mailbox: RowMailbox | None = None  # made when it is first needed

    def make(self, kind: Callable[..., Any], *args: Any) -> None:
        """Create the rank's object, ``kind(*args)``."""
        with self._contained():
            self.instance = kind(*args)

    def enter(self, generation: int) -> None:
        """Set the pool's generation number. From now on, calls with an earlier number are refused."""
        self.generation = generation

    def do(self, generation: int, method: str, *args: Any) -> Any:
        """Call a method of the rank's object, and return the result.

        Raises RuntimeError if ``generation`` is an earlier generation of the pool.
        """
        self._check_generation(generation, method)
        with pulse.MARKS.during(method), self._contained():
            return getattr(self.instance, method)(*args)

    def do_run(self, *parts: Any) -> Any:
        """Pass a frame to the ``run`` method of the rank's object, and return the answer.

        ``parts``: the frame, which starts with its generation number, followed by the transferred rows. The
        signature looks like this because Ray is fastest with bytes, few arguments, and a starred parameter.
        """
        return self._run(parts[0], *parts[1:])

    def _run(self, frame: bytes, *transfers: Any) -> Any:
        with self._contained():
            return self.instance.run(self._frame(frame, "run"), *transfers)

    def do_chunks(self, *parts: Any) -> Iterator[Any]:
        """Pass a frame to the ``run_chunks`` method of the rank's object. Yield answers as they come.

        ``parts``: as in ``do_run``.
        """
        with self._contained():
            yield from self.instance.run_chunks(self._frame(parts[0], "run_chunks"), *parts[1:])

    def do_batch(self, method: str, row_message: RowMessage, shared: bool) -> RowMessage:
        """Call a method that maps a batch to a batch on the rank's object. Return a message with the result.

        ``shared``: whether the caller can read this process's shared memory.
        """
        with pulse.MARKS.during(method), self._contained():
            [batch] = self._mailbox().opened([row_message])
            return self._mailbox().message(getattr(self.instance, method)(owned(batch)), shared=shared)

    def reaches(self, at: SharedFrame) -> bool:
        """Whether this process can read the caller's shared memory. ``at``: a frame in that memory."""
        return self._mailbox().reaches(at)

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        """Return a context manager for a call that keeps exceptions from ending this process.

        A SystemExit becomes a RemoteError, which is an ordinary error. If the call forks this process, the
        child exits instead of carrying on as a worker.
        """
        with process_tag.here_alone():
            try:
                yield
            except AS_THEY_ARE as error:
                error.add_note(in_worker(error))
                raise
            except Exception as error:
                raise portable(error) from None
            except GeneratorExit:
                raise
            except BaseException as error:
                raise RemoteError(ending(error)) from None

    def _frame(self, frame: bytes, method: str) -> memoryview:
        """Return a frame without its generation number. ``method``: the called method, for messages.

        Raises RuntimeError if the frame is from an earlier generation of the pool.
        """
        self._check_generation(int.from_bytes(frame[:GENERATION_BYTES], "little"), method)
        return memoryview(frame)[GENERATION_BYTES:]

    def _check_generation(self, generation: int, method: str) -> None:
        if generation != self.generation:
            raise RuntimeError(
                f"'{method}' was called in generation {generation} of the pool, which is now in generation {self.generation}"
            )

    def _mailbox(self) -> RowMailbox:
        self.mailbox = self.mailbox or RowMailbox()
        return self.mailbox
