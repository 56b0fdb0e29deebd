"""Start a Ray cluster on this machine without the processes that a run doesn't need.

These are the dashboard, the autoscaler, the log monitor and the raylet's two agents. They are Python programs
with slow imports, and Ray would wait for them. The raylet also starts workers with the fork server's command,
so they don't need Ray's runtime-env agent.

All of this relies on private parts of Ray (``ray_private``). If they differ in the installed version, Ray
starts as usual.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.cluster import ray_private

RAYLET = "raylet"
WORKERS, AGENTS = "--python_worker_command=", ("--dashboard_agent_command=", "--runtime_env_agent_command=")
STAND_IN = Path(__file__).with_name("stand_in.py")


@dataclass
class WorkerStart:
    """How Ray starts the workers of a run."""

    threads: int  # torch threads in each worker
    python: str | None = None  # command that starts a worker instead of Python (`rlflow.cluster.forking`)
    # whether a Ray cluster that the run starts keeps its agents, which workers with different environment
    # variables need
    agents: bool = False
    built_in: bool = False  # whether Ray starts every worker this way by default

    @property
    def variables(self) -> dict[str, str]:
        """Additional environment variables for each worker."""
        return {"OMP_NUM_THREADS": str(self.threads), "TOKENIZERS_PARALLELISM": "false"}

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Make Ray clusters that are started in this context lean.

        If the cluster can do without agents, it also starts workers as this object describes.
        """
        services, node = ray_private.services(), ray_private.node_class()
        if services is None or node is None:
            yield
            return
        with contextlib.ExitStack() as restored:
            for name in ray_private.UNUSED:
                restored.callback(setattr, node, name, getattr(node, name))
                setattr(node, name, _start_nothing)
            original = services.start_ray_process
            restored.callback(setattr, services, "start_ray_process", original)

            def start_process(command: list[str], process_type: str, *arguments: Any, **more: Any) -> Any:
                lean = self.command(command) if process_type == RAYLET else None
                if lean is not None:
                    more["env_updates"] = {**(more.get("env_updates") or {}), **self.variables}
                    self.built_in = True
                return original(lean or command, process_type, *arguments, **more)

            services.start_ray_process = start_process
            yield

    def command(self, command: Sequence[str]) -> list[str] | None:
        """Change the raylet's command to use the fork server and stand-ins for the agents. Return it.

        Returns None if the command must stay as it is.
        """
        words, flags = list(command), [word.partition("=")[0] + "=" for word in command]
        if self.agents or any(flag not in flags for flag in (WORKERS, *AGENTS)):
            return None
        if self.python is not None:
            place, usual = (
                flags.index(WORKERS),
                subprocess.list2cmdline([sys.executable, ray_private.setup_worker()]),
            )
            if not words[place].startswith(WORKERS + usual):
                return None
            python, *rest = shlex.split(self.python)
            # the raylet searches for the second word and drops it
            ours = subprocess.list2cmdline([python, ray_private.setup_worker(), *rest])
            words[place] = WORKERS + ours + words[place].removeprefix(WORKERS + usual)
        for agent in AGENTS:
            words[flags.index(agent)] = agent + shlex.join([sys.executable, "-I", "-S", str(STAND_IN)])
        return words if ray_private.report_no_ports(words) else None


def _start_nothing(node: Any, *arguments: Any, **more: Any) -> None:
    """Do nothing. This replaces methods of Ray's node that start a process.

    It only sets the dashboard's address, to an empty string.
    """
    if "include_dashboard" in more:
        ray_private.has_no_dashboard(node)
