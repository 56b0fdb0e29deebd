"""`--env python`: the model writes Python, reads what it prints, and goes on.

The code of the last block between ```` ```python ```` and ```` ``` ```` is run in a process of its own, which
may only compute: no network, no program, no other process, no change of a file, and none to read but the
interpreter's own and its packages. It is killed at its deadline.
"""

from __future__ import annotations

import re
import tempfile

from rlflow.author.turn import Turn
from rlflow.errors import listed
from rlflow.processes.sandbox import probe
from rlflow.rewards.environments.shipped import sandboxed

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class Python:
    """Runs code. A turn without any is the answer, which the run's rewards judge."""

    def __init__(
        self, *, timeout: float = 5.0, memory: int = 512, prints: int = 2000, unsafe: bool = False
    ) -> None:
        """timeout: seconds that a block may run. memory: MiB that it may take. prints: characters of its
        output that the model reads.
        unsafe: run code also where this machine cannot isolate it."""
        if not unsafe and (lacks := probe.missing("code")):
            raise ValueError(
                f"code of a model cannot be isolated here: this machine has no wall around {listed(lacks)} "
                "(rlflow doctor); in a container that holds nothing else, --env.unsafe true runs it without"
            )
        self.timeout, self.memory, self.prints = timeout, memory, prints
        self.blocks = 0

    def step(self, text: str) -> Turn:
        """Run the last block of a turn."""
        blocks = BLOCK.findall(text)
        if not blocks:
            return Turn(done=True, log={"blocks": self.blocks})
        self.blocks += 1
        printed = self.run(blocks[-1])
        return Turn(says=f"\n```output\n{printed[: self.prints].rstrip()}\n```\n")

    def run(self, code: str) -> str:
        """Run code. Gives its output, and the error that ended it."""
        with tempfile.TemporaryDirectory() as folder:
            done = sandboxed.ended(code.encode(errors="replace").decode(), folder, self.memory, self.timeout)
        if done.late:
            return f"TimeoutError: no end after {self.timeout:g} s"
        if done.code < 0:
            return f"{done.stdout}the process was killed by signal {-done.code}"
        return done.stdout + done.stderr
