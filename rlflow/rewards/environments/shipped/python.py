"""`--env python`: the model writes Python code, reads its output, and continues.

The last block between ```` ```python ```` and ```` ``` ```` runs in a separate process that may only compute.
The code cannot use the network, start programs or processes, or change files. It can read only the files of
the interpreter and its packages. The process is killed at its deadline.
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
    """Runs the Python code in the model's turns.

    A turn without code is taken as the final answer, which the run's rewards score.
    """

    def __init__(
        self, *, timeout: float = 5.0, memory: int = 512, prints: int = 2000, unsafe: bool = False
    ) -> None:
        """Check that this machine can isolate code.

        timeout: seconds for each code block. memory: MiB for each code block. prints: how many characters of
        output the model reads at most. unsafe: True to run code even if this machine can't isolate it.
        """
        if not unsafe and (lacks := probe.missing("code")):
            raise ValueError(
                f"code of a model cannot be isolated here: the sandbox cannot restrict {listed(lacks)} "
                "(rlflow doctor); in a container without other data, --env.unsafe true allows it"
            )
        self.timeout, self.memory, self.prints = timeout, memory, prints
        self.blocks = 0

    def step(self, text: str) -> Turn:
        """Run the last code block of a turn, and return its output as the next message.

        A turn without a code block ends the episode.
        """
        blocks = BLOCK.findall(text)
        if not blocks:
            return Turn(done=True, log={"blocks": self.blocks})
        self.blocks += 1
        printed = self.run(blocks[-1])
        return Turn(says=f"\n```output\n{printed[: self.prints].rstrip()}\n```\n")

    def run(self, code: str) -> str:
        """Run code and return its output, followed by the error if it raised one."""
        with tempfile.TemporaryDirectory() as folder:
            done = sandboxed.ended(code.encode(errors="replace").decode(), folder, self.memory, self.timeout)
        if done.late:
            return f"TimeoutError: not finished after {self.timeout:g} s"
        if done.code < 0:
            return f"{done.stdout}the process was killed by signal {-done.code}"
        return done.stdout + done.stderr
