"""`rlflow serve reward` scores rows over HTTP. It accepts requests in the formats of OpenRLHF and SkyPilot.

``POST /get_reward`` uses OpenRLHF's format for remote reward models, as does ``--reward URL``. It takes
``{"query": […], "prompts": […], "labels": […]}``, where a query is a prompt followed by its completion. It
returns ``{"rewards": […]}``: the weighted sum of all rewards for each row, or null if the row has no score.
The response also has ``missing``, which says how many rows have no score, by cause.

``POST /batch_reward`` uses the format of SkyPilot's reward server. It takes ``{"items": [{"prompt",
"response", "ground_truth"}, …]}`` and returns ``{"rewards": [{"reward", "correct"}, …], "accuracy"}``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel

from rlflow.author.batch import Batch
from rlflow.config.roles.bound import side_class
from rlflow.data.encode import TokenizerEncoder
from rlflow.data.scorer import MATCH, DataShape
from rlflow.errors import PlanError, listed
from rlflow.rewards.reward import Reward, bind
from rlflow.rewards.reward_pool import RewardPool
from rlflow.rewards.reward_spec import RewardSpec
from rlflow.services.serving.server import application
from rlflow.training.protocols import ModelSpec

GIVEN = ("prompt", "completion", "answer", "label")  # columns that a row of a request has
ROWS = 64  # number of rows that a model scores together


class Question(BaseModel):
    """A request to /get_reward."""

    query: list[str]
    prompts: list[str]
    labels: list[Any] = []

    def rows(self) -> list[dict[str, Any]]:
        """Return the request's rows, with the columns that rewards can read.

        Raises ValueError if the request's lists differ in length.
        """
        labels = self.labels or [None] * len(self.query)
        if not len(self.query) == len(self.prompts) == len(labels):
            counts = f"query {len(self.query)}, prompts {len(self.prompts)}, labels {len(labels)}"
            raise ValueError(f"expected as many rows in each list, found {counts}")
        return [
            _row(prompt, query.removeprefix(prompt), label)
            for query, prompt, label in zip(self.query, self.prompts, labels, strict=True)
        ]


class ScoredItem(BaseModel):
    """One row in a request to /batch_reward."""

    response: str
    prompt: str = ""
    ground_truth: Any = None


class ScoredItems(BaseModel):
    """A request to /batch_reward."""

    items: list[ScoredItem]


def _row(prompt: str, completion: str, label: Any) -> dict[str, str]:
    """Return a row with the columns that rewards can read, as column name → value."""
    text = "" if label is None else label if isinstance(label, str) else str(label)
    return {"prompt": prompt, "completion": completion, "answer": text, "label": text}


class RowScorer(Protocol):
    """A reward that scores rows."""

    weight: float

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], Mapping[str, int]]:
        """Return a score per row (NaN if missing), and how many rows have no score, by cause."""


class ServedRewards:
    """All rewards of a server. ``close`` ends their processes."""

    def __init__(
        self, specs: Sequence[RewardSpec], pool: RewardPool, timeout: float, device: str = "cpu"
    ) -> None:
        """Load the rewards.

        ``timeout``: time limit per row, in seconds. Raises PlanError if a reward reads a column that requests
        don't have.
        """
        texts = bind([spec for spec in specs if spec.judges_text], pool, DataShape({}, MATCH), timeout)
        for reward in texts:
            _check(reward)
        models = [_Model(spec, device) for spec in specs if spec.kind == "model"]
        self.scorers: list[RowScorer] = [*map(_Text, texts), *models]

    def rewards(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Score the rows and return the response to send."""
        total, missing = [0.0] * len(rows), Counter[str]()
        for scorer in self.scorers:
            scores, lacking = scorer.scores(rows)
            missing.update(lacking)
            total = [sum_ + scorer.weight * score for sum_, score in zip(total, scores, strict=True)]
        return {
            "rewards": [score if math.isfinite(score) else None for score in total],
            "missing": dict(missing),
        }


class _Text:
    """A reward function that scores text in a pool of processes."""

    def __init__(self, reward: Reward) -> None:
        self.weight, self._reward = reward.weight, reward

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], Mapping[str, int]]:
        """Return a score per row, and how many rows have no score, by cause."""
        names = [name for name in (*self._reward.reads, *self._reward.optional) if name in GIVEN]
        values = [[row[name] for name in names] for row in rows]
        results = self._reward.judged(
            self._reward.pool.submit(self._reward.scorer, names, values, self._reward.timeout)
        )
        return list(results.values), results.missing


class _Model:
    """A reward model. The prompt and the completion are tokenized separately, so no token spans both."""

    def __init__(self, spec: RewardSpec, device: str) -> None:
        kind = side_class("local", "trainer")
        self.weight, self._encoder = spec.weight, TokenizerEncoder(spec.path)
        self._trainer = kind(ModelSpec(Path(spec.path), "scores", device=device), kind.Settings())

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], Mapping[str, int]]:
        """Return a score per row, and how many rows have no score, by cause."""
        prompts = self._encoder.prompts([row["prompt"] for row in rows])
        completions = [
            self._encoder.tokenizer(row["completion"], add_special_tokens=False)["input_ids"] for row in rows
        ]
        usable = [number for number in range(len(rows)) if prompts[number] and completions[number]]
        scores = [math.nan] * len(rows)
        for start in range(0, len(usable), ROWS):
            part = usable[start : start + ROWS]
            batch = Batch.of(
                prompt_tokens=[prompts[number] for number in part],
                tokens=[completions[number] for number in part],
            )
            for number, score in zip(
                part,
                torch.as_tensor(self._trainer.forward(batch, ("scores",))["scores"]).tolist(),
                strict=True,
            ):
                scores[number] = score
        lacking = len(rows) - len(usable)
        return scores, {"empty": lacking} if lacking else {}


def _check(reward: Reward) -> None:
    lacking = [name for name in reward.reads if name not in GIVEN]
    if lacking:
        raise PlanError.of(
            "serve-reward",
            f"the reward '{reward.name}' reads '{lacking[0]}', which requests do not contain",
            place=reward.place,
            found=listed(reward.reads),
            expected=f"columns among {listed(GIVEN)}",
            remedy="give the parameter a default, or let the run compute the reward itself: --reward without a server",
        )


def reward_application(served: ServedRewards, names: Sequence[str]) -> Any:
    """Return the web application that scores rows. ``names``: the rewards' names, shown by /health."""
    from fastapi import HTTPException

    app = application("reward", lambda: {"rewards": list(names)})

    def get_reward(question: Question) -> dict[str, Any]:
        try:
            rows = question.rows()
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        return served.rewards(rows)

    def batch_reward(question: ScoredItems) -> dict[str, Any]:
        judged = served.rewards(
            [_row(each.prompt, each.response, each.ground_truth) for each in question.items]
        )
        correct = [score == 1.0 for score in judged["rewards"]]
        rewards = [
            {"reward": score, "correct": right}
            for score, right in zip(judged["rewards"], correct, strict=True)
        ]
        return {**judged, "rewards": rewards, "accuracy": sum(correct) / max(len(correct), 1)}

    app.add_api_route("/get_reward", get_reward, methods=["POST"])
    app.add_api_route("/batch_reward", batch_reward, methods=["POST"])
    return app
