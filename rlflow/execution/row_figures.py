"""Standard health metrics of an iteration, from columns that it has anyway.

Models compute nothing for them. If several trained roles sample, the executor computes them for each role.

    policy/kl_reference      mean over tokens of the k3 estimate of KL(policy, reference), nats (Schulman, "Approximating KL divergence")
    policy/kl_sampler        the same between trainer and sampler: 0 except for rounding if both have the same weights
    policy/mismatch_max, policy/mismatch_mean  largest and mean |logprobs - sampled_logprobs| of a token
    policy/mismatch_factor   mean of exp(|logprobs - sampled_logprobs|), the factor by which trainer and sampler differ on a token
    policy/entropy           mean entropy, nats; without an `entropy` column the mean of -logprobs, which estimates it
    critic/explained_variance  1 - Var(returns - values) / Var(returns)
    reward/missing_rate      share of rows without a score
    scores/NAME              mean score of the rows of a data source, if there are several
    reward/flat_groups       share of groups without a signal: all columns that the update computes from scores are equal
    reward/even_groups       share of groups whose scores differ by at most a tenth of the range of all scores
    reward/even_lowest, reward/even_highest  share of even groups within a tenth of the range from the lowest, or highest, score
    reward/uneven_mean       mean score of the other groups; absent if there are none
    reward/lowest, reward/highest  lowest and highest of all scores
    ROLE/lowest, …           the same for each of several rewards; even groups are even in all rewards, and a row
                             counts as missing if any of its scores is missing
    funnel/rows_…            rows that are scored, in groups that differ, not truncated; `rlflow/runs/outcomes.py`
                             has the full funnel
    response/length, response/truncated  mean tokens; share of rows that ended at max_tokens
    env/turns, env/failed    with an environment: mean turns of an episode; share of episodes that failed
    env/NAME                 mean of the numbers that turns logged under a name
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.author.columns import SOURCE, Level
from rlflow.author.figures import Figure, Of
from rlflow.author.functional import kl

TOKENS = ("mask", "logprobs", "ref_logprobs", "sampled_logprobs", "entropy", "values", "returns")
EVEN = 0.1  # share of the range of all scores; a group is even if its scores differ by no more
SAME = 1e-6  # share of a column's largest value; smaller differences count as rounding


@dataclass(frozen=True)
class ScoredRecords:
    """Which recorded columns are scores, and which are computed from scores and read by an update."""

    # reward role → column of its scores, if several roles score the rows
    rewards: Mapping[str, str] = field(default_factory=dict)
    learned: tuple[str, ...] = ()  # score-based columns that the update reads


NO_REWARDS = ScoredRecords()


def health(records: Mapping[str, Batch], judged: ScoredRecords = NO_REWARDS) -> dict[Figure, float]:
    """Return the health metrics that can be computed from the recorded columns.

    ``records``: for each name, a batch with this column. Metrics that need other columns are left out.
    """
    flat, scores = _under_mask(records), Scored.of(records, judged)
    rows = {
        **_policy(flat),
        **_critic(flat),
        **_funnel(records, scores),
        **_responses(records),
        **_episodes(records),
    }
    figures = _scores(scores) if scores else {}
    figures |= {Figure(Of.ROWS, name): value for name, value in rows.items()}
    figures |= {Figure(Of.SOURCE, name): value for name, value in _by_source(records).items()}
    return figures | {Figure(Of.LOGGED, name): value for name, value in _logged(records).items()}


def _under_mask(records: Mapping[str, Batch]) -> dict[str, Tensor]:
    """Return the values of recorded token columns under the mask, as flat float64 tensors by name.

    Tokens that no model sampled are left out.
    """
    if "mask" not in records:
        return {}
    axis, mask = records["mask"].axis, records["mask"].data["mask"].value
    columns = {name: records[name] for name in TOKENS[1:] if name in records and records[name].axis is axis}
    versions = records.get("policy_version")
    if versions is not None and versions.axis is axis:
        mask = mask & (versions.data["policy_version"].value >= 0)
        if not bool(mask.any()):
            return {}
    return {name: batch.data[name].value[mask].double() for name, batch in columns.items()}


def _policy(flat: Mapping[str, Tensor]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if "logprobs" in flat:
        metrics["policy/entropy"] = _mean(flat.get("entropy", -flat["logprobs"]))
        if "ref_logprobs" in flat:
            metrics["policy/kl_reference"] = _mean(kl(flat["logprobs"], flat["ref_logprobs"], "k3"))
        if "sampled_logprobs" in flat:
            metrics["policy/kl_sampler"] = _mean(kl(flat["logprobs"], flat["sampled_logprobs"], "k3"))
            apart = (flat["logprobs"] - flat["sampled_logprobs"]).abs()
            metrics["policy/mismatch_max"] = float(apart.max()) if len(apart) else 0.0
            metrics["policy/mismatch_mean"] = _mean(apart)
            metrics["policy/mismatch_factor"] = _mean(apart.exp()) if len(apart) else 1.0
    return metrics


def _critic(flat: Mapping[str, Tensor]) -> dict[str, float]:
    if "values" not in flat or "returns" not in flat or len(flat["returns"]) < 2:
        return {}
    spread = flat["returns"].var()
    return {
        "critic/explained_variance": float(1 - (flat["returns"] - flat["values"]).var() / spread)
        if spread > 0
        else 0.0
    }


@dataclass(frozen=True)
class Scored:
    """The scores of an iteration's rows, by reward role. If there is only one reward, its key is empty.

    Scores are float64 [rows], with NaN for a missing score.
    """

    axis: Axis
    scores: Mapping[str, Tensor]
    # for each column that the update reads, the lowest and highest value in each row, float64 [rows, 2]
    learned: tuple[Tensor, ...]

    @staticmethod
    def of(records: Mapping[str, Batch], judged: ScoredRecords) -> Scored | None:
        """Return the scores in the recorded columns, or None if no rows were scored.

        Rewards that scored other rows than the last reward did are skipped.
        """
        names = {role: name for role, name in judged.rewards.items() if name in records} or {"": "scores"}
        last = records.get([*names.values()][-1])
        if last is None or not len(last):
            return None
        own = {role: records[name] for role, name in names.items() if records[name].axis is last.axis}
        scores = {
            role: batch[name].double()
            for (role, batch), name in zip(own.items(), (names[role] for role in own), strict=True)
        }
        learned = (
            _ends(records, name)
            for name in judged.learned
            if name in records
            and records[name].axis is last.axis
            and records[name].data[name].kind.level is not Level.SCALAR
        )
        return Scored(last.axis, scores if len(scores) > 1 else {"": [*scores.values()][-1]}, tuple(learned))

    @property
    def missing(self) -> Tensor:
        """True for rows that lack a score from at least one reward, bool [rows]."""
        return torch.stack([scores.isnan() for scores in self.scores.values()]).any(0)

    @property
    def grouped(self) -> bool:
        """True if at least one group has more than one row."""
        return self.axis.grouped and self.axis.groups < len(self.axis)

    def flat(self) -> Tensor:
        """Return bool [groups], True for groups without a learning signal.

        In such a group, every score-based column that the update reads is constant. If there is no such
        column, the scores themselves are compared.
        """
        columns = self.learned or tuple(torch.stack([scores, scores], 1) for scores in self.scores.values())
        return torch.stack([self._same(column) for column in columns]).all(0)

    def _same(self, values: Tensor) -> Tensor:
        """Return bool [groups], True for groups whose values differ only by rounding.

        values: the smallest and the largest value of each row, float64 [rows, 2].
        """
        low, high = self.extremes(values)
        return ~(high - low > SAME * values.nan_to_num(0.0).abs().max())

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value of each group, both float64 [groups].

        values: the smallest and the largest value of each row, float64 [rows, 2]. A group without values gets
        inf and -inf.
        """
        slots, shape = self.axis.slots, (self.axis.groups,)
        low = torch.full(shape, torch.inf, dtype=torch.float64).scatter_reduce_(
            0, slots, values[:, 0].nan_to_num(torch.inf), "amin"
        )
        high = torch.full(shape, -torch.inf, dtype=torch.float64)
        return low, high.scatter_reduce_(0, slots, values[:, 1].nan_to_num(-torch.inf), "amax")


def _ends(records: Mapping[str, Batch], name: str) -> Tensor:
    """Return the smallest and the largest value of each row of a column, float64 [rows, 2].

    Of values per token, only those under the mask count. A row without values has NaN.
    """
    data, axis = records[name].data[name], records[name].axis
    values = torch.as_tensor(data.value).double()
    if data.kind.level is not Level.TOKEN or data.lengths is None:
        return torch.stack([records[name][name].double()] * 2, 1)
    rows = torch.arange(len(axis)).repeat_interleave(data.lengths)
    masked = "mask" in records and records["mask"].axis is axis
    counts = records["mask"].data["mask"].value if masked else torch.ones_like(rows, dtype=torch.bool)
    low, high = (
        torch.full((len(axis),), end, dtype=torch.float64).scatter_reduce_(
            0, rows[counts], values[counts], how
        )
        for end, how in ((torch.inf, "amin"), (-torch.inf, "amax"))
    )
    return torch.where(torch.isinf(low) | torch.isinf(high), torch.nan, 1.0)[:, None] * torch.stack(
        [low, high], 1
    )


def _scores(scored: Scored) -> dict[Figure, float]:
    """Return the metrics of all scores together and, if there are several rewards, of each one."""
    several = len(scored.scores) > 1
    figures = {Figure(Of.SCORES, "missing_rate"): float(scored.missing.double().mean())}
    for role, scores in scored.scores.items():
        present = scores[~scores.isnan()]
        if several:
            figures[Figure(Of.SCORES, "missing_rate", part=role)] = float(scores.isnan().double().mean())
        for name, end in (("lowest", torch.min), ("highest", torch.max)) if len(present) else ():
            figures[Figure(Of.SCORES, name, part=role)] = float(end(present))
    return figures | (_groups(scored) if scored.grouped else {})


def _groups(scored: Scored) -> dict[Figure, float]:
    """Return the shares of flat groups, of even groups, and of even groups near the lowest or highest score.

    The mean score of groups that aren't even is included too.
    """
    figures = {Figure(Of.SCORES, "flat_groups"): _mean(scored.flat().double())}
    if not all(bool((~scores.isnan()).any()) for scores in scored.scores.values()):
        return figures
    every = [_even(scored, scores) for scores in scored.scores.values()]
    even, lowest, highest = (torch.stack(each).all(0) for each in zip(*every, strict=True))
    shares = {"even_groups": even, "even_lowest": even & lowest, "even_highest": even & highest}
    figures |= {Figure(Of.SCORES, name): _mean(where.double()) for name, where in shares.items()}
    for role, scores in scored.scores.items():
        if len(others := scores[~even[scored.axis.slots]]):
            figures[Figure(Of.SCORES, "uneven_mean", part=role)] = _mean(others)
    return figures


def _even(scored: Scored, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three masks, bool [groups]: groups whose scores are even, near the lowest, near the highest."""
    present = scores[~scores.isnan()]
    lowest, highest = float(present.min()), float(present.max())
    near = EVEN * (highest - lowest)
    low, high = scored.extremes(torch.stack([scores, scores], 1))
    return high - low <= near, low <= lowest + near, high >= highest - near


def _funnel(records: Mapping[str, Batch], scored: Scored | None) -> dict[str, float]:
    """Count the rows with a score, then those in groups whose scores differ, then the untruncated of those."""
    if scored is None:
        return {}
    left = ~scored.missing
    rows = {"scored": left}
    if scored.grouped:
        rows["mixed"] = left = left & ~scored.flat()[scored.axis.slots]
    if "finish" in records and records["finish"].axis is scored.axis:
        rows["untruncated"] = left & torch.tensor(
            [reason != "length" for reason in records["finish"]["finish"]]
        )
    return {f"funnel/rows_{name}": float(where.sum()) for name, where in rows.items()}


def _by_source(records: Mapping[str, Batch]) -> dict[str, float]:
    """Return the mean score of each data source, or an empty dict if the rows have no source."""
    if "scores" not in records or SOURCE not in records or not len(records["scores"]):
        return {}
    index = records[SOURCE].axis.rows_of(records["scores"].axis)
    if index is None or bool((index < 0).any()):
        return {}
    names, scores = records[SOURCE][SOURCE], records["scores"]["scores"].double()
    sources = [names[row] for row in index.tolist()]
    rows = {name: torch.tensor([source == name for source in sources]) for name in sorted(set(sources))}
    return {name: _mean(scores[where]) for name, where in rows.items()}


def _responses(records: Mapping[str, Batch]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if "tokens" in records and len(records["tokens"]):
        lengths = records["tokens"].data["tokens"].row_lengths
        metrics["response/length"] = float(lengths.double().mean())
    if "finish" in records and len(records["finish"]):
        finish = records["finish"]["finish"]
        metrics["response/truncated"] = sum(reason == "length" for reason in finish) / len(finish)
    return metrics


def _episodes(records: Mapping[str, Batch]) -> dict[str, float]:
    if "episode" not in records or not len(records["episode"]):
        return {}
    turns = float(records["turns"]["turns"].double().mean()) if "turns" in records else 0.0
    causes = records["failed"]["failed"] if "failed" in records else ()
    return {"env/turns": turns, "env/failed": sum(map(bool, causes)) / max(len(causes), 1)}


def _logged(records: Mapping[str, Batch]) -> dict[str, float]:
    """Return the mean of each number that environments logged in their turns, by name."""
    logged: dict[str, list[float]] = {}
    for text in records["episode"]["episode"] if "episode" in records else ():
        for turn in json.loads(text)["turns"] if '"log"' in text else ():
            for name, value in turn.get("log", {}).items():
                logged.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(logged.items())}


def _mean(values: Tensor) -> float:
    """Return the mean of the finite values, or 0 if there are none."""
    finite = values[values.isfinite()]
    return float(finite.mean()) if len(finite) else 0.0
