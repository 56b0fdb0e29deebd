"""`--env skyrl_gym:ID`: an environment of SkyRL-Gym, the library of SkyRL (NovaSky 2025)."""

from __future__ import annotations

import json
import numbers
from typing import Any

from rlflow.author.turn import Turn
from rlflow.extras import require


class Gym:
    """One episode of a SkyRL-Gym environment.

    The environment gets the record's fields as ``extras``. If there's no ``reward_spec`` among them, one is
    made from ``answer``.
    """

    def __init__(
        self, *, id: str, config: str = "{}", max_turns: int | None = None, chat: bool = False
    ) -> None:
        """Store the settings.

        id: a name that `skyrl_gym.make` accepts, such as gsm8k. config: the environment's settings, as JSON.
        max_turns: the limit passed to the environment. chat: True to pass the environment's messages through
        the chat template, False to append them to the model's text.
        """
        self.gym: Any = require("skyrl_gym", extra="environments")
        omegaconf: Any = require("omegaconf", extra="environments")
        self.id, self.config, self.chat = id, omegaconf.OmegaConf.create(json.loads(config)), chat
        self.turns = {} if max_turns is None else {"max_turns": max_turns}

    def reset(self, prompt: str, answer: str = "", *, seed: int, **fields: Any) -> Any:
        """Start an episode with one record, and return the first text or messages for the model."""
        extras = {"reward_spec": {"method": "rule", "ground_truth": answer}, **fields, **self.turns}
        self.episode = self.gym.make(self.id, env_config=self.config, extras=extras)
        whole = [{"role": "user", "content": prompt}]
        begun, _ = self.episode.init(list(whole))
        if list(begun[:1]) != whole:
            raise ValueError(
                f"{self.id} changes prompts, but they are encoded before an episode begins: found "
                f"{begun[:1]}, expected {whole}"
            )
        return self._says(begun[1:])

    def step(self, text: str) -> Turn:
        """Send the model's reply to the environment, and return the environment's answer as a turn."""
        output = self.episode.step(text)
        measured = self.episode.get_metrics() if output["done"] else {}
        log = {name: float(value) for name, value in measured.items() if isinstance(value, numbers.Real)}
        return Turn(
            says=self._says(output["observations"]),
            reward=float(output["reward"]),
            done=bool(output["done"]),
            log=log,
        )

    def close(self) -> None:
        """End the episode."""
        self.episode.close()

    def _says(self, messages: list[dict[str, str]]) -> Any:
        return list(messages) if self.chat else "".join(message["content"] for message in messages)
