"""Judges of answers to held-out prompts: one reward, which gives the answer within a response beside its
score where it can."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.author.columns import SOURCE, field_column
from rlflow.author.verbs import OF_EPISODES
from rlflow.data.scorer import Judged
from rlflow.errors import PlanError, listed, nearest
from rlflow.rewards.reward import Reward, submit_all
from rlflow.rewards.reward_spec import RewardSpec
from rlflow.rewards.scorers import BUILT_IN

SAMPLED = ("completion", "finish")  # row columns that a sampled answer has beside those of its prompt


@dataclass(frozen=True)
class Judgement:
    """The scores of answers and what was read out of them, row by row."""

    scores: Tensor  # float [rows]; NaN where the score is missing
    extracted: tuple[str | None, ...]  # the answer within each response; None where the judge read none


@dataclass(frozen=True)
class HeldOutJudge:
    """Judges answers in processes of the driver: what was said last under an environment."""

    dtype: torch.dtype
    # by source of data, or one with an empty name; none where the environment itself says whether an episode
    # was right
    rewards: Mapping[str, Reward]

    @staticmethod
    def of(dtype: torch.dtype, rewards: Mapping[str, Reward]) -> HeldOutJudge:
        """A judge whose built-in scorers give answers too."""
        return HeldOutJudge(dtype, {source: _extracting(reward) for source, reward in rewards.items()})

    def __call__(self, batch: Batch) -> Judgement:
        """Judge rows with the columns of their prompts and of their completions. An episode that failed has
        no score."""
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
        # all at once
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
    """The reward, which gives the answer within a response too where its scorer comes with rlflow."""
    scorer = reward.scorer
    if scorer.kind not in BUILT_IN:
        return reward
    return dataclasses.replace(
        reward, scorer=dataclasses.replace(scorer, settings={**scorer.settings, "extract": True})
    )


def check_judge(reward: Reward, name: str, data: Judged) -> None:
    """Raises PlanError where the judge of the held-out set ``name`` reads what its rows do not have."""
    there = [*data.columns, *SAMPLED]
    for column in reward.reads:
        if column not in there and field_column(column) not in there:
            raise PlanError.of(
                "eval-column",
                f"the reward '{reward.name}' reads '{column}', which the held-out set '{name}' has not",
                found=listed(data.columns),
                expected=f"a field '{column}' in '{name}'",
                nearest=nearest(column, there),
                remedy=f"map it: --data.{name}.{column} FIELD, or name another judge: --reward REWARD@{name}",
            )


def no_judge(name: str, rewards: tuple[RewardSpec, ...]) -> PlanError:
    """The error that nothing says whether an answer to a prompt of the held-out set ``name`` is right."""
    return PlanError.of(
        "eval-reward",
        f"nothing judges the held-out set '{name}'",
        found=f"no answer in its records, and the rewards {listed(reward.name for reward in rewards)}",
        expected="a field with the right answer, or a reward that is a function or a server",
        remedy=f"--data.{name}.answer FIELD, or --reward REWARD@{name}",
    )
