"""`--env textarena:ID`: the model plays a single-player game from TextArena (Guertler et al. 2025,
arXiv:2504.11442)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlflow.author.turn import Turn
from rlflow.errors import PlanError, nearest
from rlflow.extras import require

OWN = 0  # the game's number for its only player


class Game:
    """One game of TextArena.

    The model reads the prompt from the data, then the rules, and after each turn the game's message. The game
    gives its reward when it ends.
    """

    def __init__(self, *, id: str, chat: bool = False) -> None:
        """Create the game.

        id: a name that `textarena.make` accepts, such as GuessTheNumber-v0. chat: True to send the game's
        messages with the role user, for models with a chat template; False to append them as text.
        """
        arena: Any = require("textarena", extra="environments")
        known = arena.envs.registration.ENV_REGISTRY
        if id not in known:
            raise PlanError.of(
                "env-unknown",
                f"TextArena does not have a game '{id}'",
                found=id,
                expected=f"one of its {len(known)} games",
                nearest=nearest(id, known),
                remedy="textarena.pprint_registry_detailed() lists them",
            )
        raw = f"{id}-raw"  # without wrappers, which would repeat earlier messages
        self.game, self.chat = arena.make(raw if raw in known else id), chat
        self.rng_state: Any = None  # the state of this game's random generator; None before the first use
        self.own_words = arena.ObservationType.PLAYER_ACTION

    def reset(self, *, seed: int) -> Any:
        """Start the game, and return the rules."""
        with self._own_rng():
            random.seed(seed)
            self.game.reset(num_players=1, seed=seed)
            return self._new_messages()

    def step(self, text: str) -> Turn:
        """Make a move, and return the game's answer as a turn."""
        with self._own_rng():
            done, _ = self.game.step(action=text)
            if not done:
                return Turn(says=self._new_messages())
            rewards, facts = self.game.close()
        log = {name: facts[OWN][name] for name in ("turn_count", "invalid_move") if name in facts[OWN]}
        return Turn(
            reward=float((rewards or {}).get(OWN, 0.0)),
            done=True,
            log={name: float(value) for name, value in log.items()},
        )

    def _new_messages(self) -> Any:
        """Return the game's messages since the last call, leaving out the player's own."""
        _, text = self.game.get_observation()
        if not isinstance(text, str):
            text = "\n".join(words for _, words, kind in text if kind is not self.own_words)
        return [{"role": "user", "content": text}] if self.chat else f"\n{text}\n"

    @contextmanager
    def _own_rng(self) -> Iterator[None]:
        """Use this game's own random state inside the context.

        TextArena's games draw from Python's global random generator. With separate states, games in the same
        process don't affect each other.
        """
        outer = random.getstate()
        if self.rng_state is not None:
            random.setstate(self.rng_state)
        try:
            yield
        finally:
            self.rng_state = random.getstate()
            random.setstate(outer)
