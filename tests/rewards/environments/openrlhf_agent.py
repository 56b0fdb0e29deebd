"""An agent like OpenRLHF's examples: it prompts until the model guesses a number."""

from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"] + " Guess: "}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        self.step_idx += 1
        assert states["observation_text"].endswith((" Guess: ", "\nAgain: "))
        right = states["action_text"].strip() == states["label"]
        reward = torch.tensor(1.0 if right else -0.1)
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "" if right else "\nAgain: ",
            "done": right,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"steps": torch.tensor(self.step_idx), "note": "text"},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
