"""`--env openrlhf:FILE.py`: the class `AgentInstance` in a file written for OpenRLHF's `--agent_func_path`.

Such a file imports its base classes from `openrlhf.utils.agent`. If OpenRLHF isn't installed, empty classes
stand in for them. That's enough, because rlflow runs the episode, not an OpenRLHF executor.
"""

from __future__ import annotations

import importlib.util
import numbers
import sys
import types
from pathlib import Path
from typing import Any

from rlflow.author.turn import Turn
from rlflow.rewards.scorers import user_module

MODULE = "openrlhf.utils.agent"
BASES = ("AgentInstanceBase", "AgentExecutorBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor")


class Agent:
    """One episode with an OpenRLHF agent.

    A turn's reward is the field ``rewards`` of the agent's answer. The agent's text is appended to the
    model's text without a chat template.
    """

    def __init__(self, *, id: Path) -> None:
        """Load the agent from its file. id: path of the file."""
        _stand_in()
        self.agent: Any = user_module(str(id), id.read_text("utf-8")).AgentInstance()
        self.observation = self.label = ""

    async def reset(self, prompt: str, answer: str = "", *, seed: int) -> str:
        """Start an episode. ``answer`` is passed to the agent as the label.

        Returns the text that the agent appends to the prompt before the model's first turn.
        """
        begun = await self.agent.reset({"observation": prompt, "label": answer})
        self.observation, self.label = str(begun["observation"]), answer
        if not self.observation.startswith(prompt):
            raise ValueError(
                "the agent changes prompts, but they are encoded before an episode begins: found "
                f"{self.observation[:80]!r}, expected a text that begins with {prompt[:80]!r}"
            )
        return self.observation[len(prompt) :]

    async def step(self, text: str) -> Turn:
        """Send the model's reply to the agent, and return the agent's answer as a turn."""
        states = {
            "observation_text": self.observation,
            "action_text": text,
            "label": self.label,
            "sampling_params": None,
        }
        result = await self.agent.step(states)
        says, done = str(result["environment_feedback"]), bool(result["done"])
        self.observation += text + says
        logs = {
            name: float(value) for name, value in result.get("extra_logs", {}).items() if _is_number(value)
        }
        return Turn(says="" if done else says, reward=float(result["rewards"]), done=done, log=logs)


def _is_number(value: Any) -> bool:
    """True if a value is a number, or a tensor with one number."""
    return isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0


def _stand_in() -> None:
    """If OpenRLHF isn't installed, register a module with empty base classes for agents to import."""
    if MODULE in sys.modules or importlib.util.find_spec("openrlhf") is not None:
        return
    parts = MODULE.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        sys.modules[name] = types.ModuleType(name)
    for base in BASES:
        setattr(
            sys.modules[MODULE], base, type(base, (), {"__init__": lambda self, *arguments, **keywords: None})
        )
