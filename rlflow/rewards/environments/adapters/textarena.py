"""`--env textarena:ID`: the model plays a game of TextArena (Guertler et al. 2025, arXiv:2504.11442) that is
for one player."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlflow.author.turn import Turn
from rlflow.errors import PlanError, nearest
from rlflow.extras import require

OWN = 0  # the number of the only player


class Game:
    """One game. Its rules come before the model's first turn, and after each turn what the game says to it;
    the reward is the game's, at its end. The prompt of the data stands before all of it."""

    def __init__(self, *, id: str, chat: bool = False) -> None:
        """id: as `textarena.make` takes it, such as GuessTheNumber-v0. chat: whether what the game says is a
        message of the role user, for models with a chat template, or text."""
        arena: Any = require("textarena", extra="environments")
        known = arena.envs.registration.ENV_REGISTRY
        if id not in known:
            raise PlanError.of(
                "env-unknown",
                f"TextArena has no game '{id}'",
                found=id,
                expected=f"one of its {len(known)} games",
                nearest=nearest(id, known),
                remedy="textarena.pprint_registry_detailed() lists them",
            )
        raw = f"{id}-raw"  # without wrappers, which would say again what was said before
        self.game, self.chat = arena.make(raw if raw in known else id), chat
        self.chance: Any = None  # the state of its generator
        self.own_words = arena.ObservationType.PLAYER_ACTION

    def reset(self, *, seed: int) -> Any:
        """Begin the game."""
        with self._own_chance():
            random.seed(seed)
            self.game.reset(num_players=1, seed=seed)
            return self._heard()

    def step(self, text: str) -> Turn:
        """Make a move."""
        with self._own_chance():
            done, _ = self.game.step(action=text)
            if not done:
                return Turn(says=self._heard())
            rewards, facts = self.game.close()
        log = {name: facts[OWN][name] for name in ("turn_count", "invalid_move") if name in facts[OWN]}
        return Turn(
            reward=float((rewards or {}).get(OWN, 0.0)),
            done=True,
            log={name: float(value) for name, value in log.items()},
        )

    def _heard(self) -> Any:
        """The words of the game since it was last asked, without the player's own."""
        _, text = self.game.get_observation()
        if not isinstance(text, str):
            text = "\n".join(words for _, words, kind in text if kind is not self.own_words)
        return [{"role": "user", "content": text}] if self.chat else f"\n{text}\n"

    @contextmanager
    def _own_chance(self) -> Iterator[None]:
        """Games draw from the one generator of their process; with a state of its own each is the same beside
        others and alone."""
        outer = random.getstate()
        if self.chance is not None:
            random.setstate(self.chance)
        try:
            yield
        finally:
            self.chance = random.getstate()
            random.setstate(outer)
