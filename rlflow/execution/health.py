"""Standard health metrics of an iteration, from the columns that it has anyway: nothing is computed by a model for them. Where several
trained roles sample, the executor has them measured for each.

    policy/kl_reference      mean over tokens of the k3 estimate of KL(policy, reference), nats (Schulman, "Approximating KL divergence")
    policy/kl_sampler        the same between trainer and sampler: 0 but for rounding where both hold the same weights
    policy/mismatch_max, policy/mismatch_mean  largest and mean |logprobs - sampled_logprobs| of a token
    policy/mismatch_factor   mean of exp(|logprobs - sampled_logprobs|), the factor by which trainer and sampler differ on a token
    policy/entropy           mean entropy, nats; without an `entropy` column the mean of -logprobs, which estimates it
    critic/explained_variance  1 - Var(returns - values) / Var(returns)
    reward/missing_rate      share of rows without a score
    scores/NAME              mean score of the rows of a source of data, where there are several
    reward/flat_groups       share of groups whose scores are all equal: they carry no signal
    reward/even_groups       share of groups whose scores lie within a tenth of the width of all: what a charge on scores leaves flat
    reward/even_lowest, reward/even_highest  share of those groups within a tenth of the width from the lowest, or the highest, score
    reward/uneven_mean       mean score of the other groups; absent where there are none
    reward/lowest, reward/highest  of all scores
    funnel/rows_…            rows that are scored, in groups that differ, not truncated: `rlflow/runs/funnel.py` has the whole funnel
    response/length, response/truncated  mean tokens; share of rows that ended at max_tokens
    env/turns, env/failed    under an environment, mean turns of an episode; share of episodes that failed
    env/NAME                 mean of the numbers that its turns logged under a name
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from rlflow.batch import Batch
from rlflow.columns import SOURCE
from rlflow.figures import Figure, Of
from rlflow.maths import kl

TOKENS = ("mask", "logprobs", "ref_logprobs", "sampled_logprobs", "entropy", "values", "returns")
EVEN = 0.1  # of the width of all scores: groups with no more than that between their scores count as even
READ = (*TOKENS, "tokens", "scores", "finish", SOURCE)


def health(records: Mapping[str, Batch]) -> dict[Figure, float]:
    """Metrics of the columns that were recorded; each absent where its columns are."""
    flat = _under_mask(records)
    rows = {**_policy(flat), **_critic(flat), **_funnel(records), **_responses(records), **_episodes(records)}
    figures = {Figure(Of.SCORES, name): value for name, value in _scores(records).items()}
    figures |= {Figure(Of.ROWS, name): value for name, value in rows.items()}
    figures |= {Figure(Of.SOURCE, name): value for name, value in _by_source(records).items()}
    return figures | {Figure(Of.LOGGED, name): value for name, value in _logged(records).items()}


def _under_mask(records: Mapping[str, Batch]) -> dict[str, Tensor]:
    """Token columns over the rows of ``mask``, flat and under it, in float64."""
    if "mask" not in records:
        return {}
    axis, mask = records["mask"].axis, records["mask"].data["mask"].value
    columns = {name: records[name] for name in TOKENS[1:] if name in records and records[name].axis is axis}
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
    return {"critic/explained_variance": float(1 - (flat["returns"] - flat["values"]).var() / spread) if spread > 0 else 0.0}


def _scores(records: Mapping[str, Batch]) -> dict[str, float]:
    if "scores" not in records or not len(records["scores"]):
        return {}
    batch = records["scores"]
    scores = batch["scores"].double()
    present = scores[~scores.isnan()]
    metrics = {"missing_rate": float(scores.isnan().double().mean())}
    if len(present):
        metrics |= {"lowest": float(present.min()), "highest": float(present.max())}
    return metrics | (_groups(batch, present) if _grouped(batch) else {})


def _grouped(batch: Batch) -> bool:
    return batch.axis.grouped and batch.axis.groups < len(batch)


def _extremes(batch: Batch) -> tuple[Tensor, Tensor]:
    """The lowest and the highest score of each group, float64 [groups]: infinite, the wrong way round, where all are missing."""
    scores, slots, shape = batch["scores"].double(), batch.axis.slots, (batch.axis.groups,)
    low = torch.full(shape, torch.inf, dtype=torch.float64).scatter_reduce_(0, slots, scores.nan_to_num(torch.inf), "amin")
    return low, torch.full(shape, -torch.inf, dtype=torch.float64).scatter_reduce_(0, slots, scores.nan_to_num(-torch.inf), "amax")


def _groups(batch: Batch, present: Tensor) -> dict[str, float]:
    """Shares of groups without any difference, and of those with hardly one, in all and at either end of the scores; the mean score of
    the rest."""
    low, high = _extremes(batch)
    metrics = {"flat_groups": _mean((high <= low).double())}
    if not len(present):
        return metrics
    lowest, highest = float(present.min()), float(present.max())
    near = EVEN * (highest - lowest)
    even = high - low <= near
    metrics |= {"even_groups": _mean(even.double()), "even_lowest": _mean((even & (low <= lowest + near)).double()),
                "even_highest": _mean((even & (high >= highest - near)).double())}  # fmt: skip
    others = batch["scores"].double()[~even[batch.axis.slots]]
    return metrics | ({"uneven_mean": _mean(others)} if len(others) else {})


def _funnel(records: Mapping[str, Batch]) -> dict[str, float]:
    """Rows with a score; of these those in groups that differ; of these those that are not truncated."""
    if "scores" not in records or not len(records["scores"]):
        return {}
    batch = records["scores"]
    left = ~batch["scores"].isnan()
    rows = {"scored": left}
    if _grouped(batch):
        low, high = _extremes(batch)
        rows["mixed"] = left = left & (high > low)[batch.axis.slots]
    if "finish" in records and records["finish"].axis is batch.axis:
        rows["untruncated"] = left & torch.tensor([reason != "length" for reason in records["finish"]["finish"]])
    return {f"funnel/rows_{name}": float(where.sum()) for name, where in rows.items()}


def _by_source(records: Mapping[str, Batch]) -> dict[str, float]:
    """Source of data → the mean score of its rows, where there are several sources."""
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
        lengths = records["tokens"].data["tokens"].lengths
        assert lengths is not None
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
    """The mean of the numbers that turns of an environment logged under a name."""
    logged: dict[str, list[float]] = {}
    for text in records["episode"]["episode"] if "episode" in records else ():
        for turn in json.loads(text)["turns"] if '"log"' in text else ():
            for name, value in turn.get("log", {}).items():
                logged.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(logged.items())}


def _mean(values: Tensor) -> float:
    """Mean of what is finite, 0 of nothing."""
    finite = values[values.isfinite()]
    return float(finite.mean()) if len(finite) else 0.0
