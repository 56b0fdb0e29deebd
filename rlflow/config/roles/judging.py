"""Judges, which score answers to held-out prompts.

A judge has one reward for each data source. Some also extract the answer from a response.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.author.columns import SOURCE, field_column
from rlflow.author.methods import OF_EPISODES
from rlflow.data.scorer import Judged
from rlflow.errors import PlanError, listed, nearest
from rlflow.rewards.reward import Reward, submit_all
from rlflow.rewards.reward_spec import RewardSpec
from rlflow.rewards.scorers import BUILT_IN

SAMPLED = ("completion", "finish")  # columns of a sampled answer, in addition to its prompt's columns


@dataclass(frozen=True)
class Judgement:
    """Each row's score and extracted answer."""

    scores: Tensor  # float [rows]; NaN for a missing score
    extracted: tuple[str | None, ...]  # the answer in each response; None if the judge found none


@dataclass(frozen=True)
class HeldOutJudge:
    """Scores answers to held-out prompts, in reward processes of the driver.

    If there is an environment, the model's last message is what is scored.
    """

    dtype: torch.dtype
    # by source of data; a single source has the name ""; empty if the environment itself scores its episodes
    rewards: Mapping[str, Reward]

    @staticmethod
    def of(dtype: torch.dtype, rewards: Mapping[str, Reward]) -> HeldOutJudge:
        """Return a judge with these rewards, by data source.

        If a source's reward is a built-in scorer, the judge also extracts answers.
        """
        return HeldOutJudge(dtype, {source: _extracting(reward) for source, reward in rewards.items()})

    def __call__(self, batch: Batch) -> Judgement:
        """Score rows that have the columns of their prompts and completions.

        Without rewards, a row's score is the one its environment gave. Failed episodes score NaN.
        """
        if "said" not in batch:
            return self._judged(batch)
        if not self.rewards:
            return Judgement(torch.as_tensor(batch["episode_score"]).to(self.dtype), (None,) * len(batch))
        judgement = self._judged(
            batch.drop("completion", *OF_EPISODES) | batch.select("said").rename(said="completion")
        )
        failed = torch.tensor([bool(cause) for cause in batch["failed"]])
        return Judgement(judgement.scores.masked_fill(failed, torch.nan), judgement.extracted)

    def _judged(self, batch: Batch) -> Judgement:
        sources = batch[SOURCE] if "" not in self.rewards else [""] * len(batch)
        rows = {
            source: [row for row, name in enumerate(sources) if name == source]
            for source in dict.fromkeys(sources)
        }
        # Submit the rows of all sources before waiting, so that they are scored at the same time.
        asked = {
            source: submit_all([self.rewards[source]], batch.rows(index)) for source, index in rows.items()
        }
        scores = torch.full((len(batch),), torch.nan, dtype=self.dtype)
        extracted: list[str | None] = [None] * len(batch)
        for source, index in rows.items():
            ((reward, call),) = asked[source]
            results = reward.judged(call)
            scores[torch.tensor(index)] = torch.tensor(results.values, dtype=self.dtype)
            for place, answer in results.answers.items():
                extracted[index[place]] = answer
        return Judgement(scores, tuple(extracted))


def _extracting(reward: Reward) -> Reward:
    """Return a version of the reward that also extracts answers, if its scorer is built in."""
    scorer = reward.scorer
    if scorer.kind not in BUILT_IN:
        return reward
    return dataclasses.replace(
        reward, scorer=dataclasses.replace(scorer, settings={**scorer.settings, "extract": True})
    )


def check_judge(reward: Reward, name: str, data: Judged) -> None:
    """Raise PlanError if the judge ``reward`` reads a column that the held-out set doesn't have.

    ``name``: the set's name. ``data``: the set itself.
    """
    there = [*data.columns, *SAMPLED]
    for column in reward.reads:
        if column not in there and field_column(column) not in there:
            raise PlanError.of(
                "eval-column",
                f"the reward '{reward.name}' reads '{column}', which the held-out set '{name}' does not have",
                found=listed(data.columns),
                expected=f"a field '{column}' in '{name}'",
                nearest=nearest(column, there),
                remedy=f"map it: --data.{name}.{column} FIELD, or choose another judge: --reward REWARD@{name}",
            )


def no_judge(name: str, rewards: tuple[RewardSpec, ...]) -> PlanError:
    """Return the error for a held-out set ``name`` whose answers none of ``rewards`` can score."""
    return PlanError.of(
        "eval-reward",
        f"no reward can score the held-out set '{name}'",
        found=f"no right answers in its records, and the rewards {listed(reward.name for reward in rewards)}",
        expected="a field with the right answer, or a reward that is a function or a server",
        remedy=f"--data.{name}.answer FIELD, or --reward REWARD@{name}",
    )
