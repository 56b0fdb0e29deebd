"""When a run must not go on as if nothing were wrong: rewards that are missing, numbers that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rlflow.batch import Batch
from rlflow.columns import Level
from rlflow.errors import StageError, listed
from rlflow.given.options import Options

WATCHED = ("scores", "logprobs", "ref_logprobs", "sampled_logprobs", "values", "returns")


class Guard:
    """Stops a run. ``reasons`` gives the first message of each cause of missing rewards."""

    def __init__(self, options: Options, reasons: Callable[[], Mapping[str, str]]) -> None:
        self.options, self.reasons = options, reasons
        self.bad = 0  # iterations in a row in which an update could take no step

    def check(self, iteration: int, metrics: Mapping[str, float], records: Mapping[str, Batch]) -> None:
        """Raises StageError where too many rewards are missing, or nothing finite was left to learn from for too long."""
        self._missing(iteration, metrics, records)
        stuck = [name.removesuffix("/steps") for name, value in metrics.items() if name.endswith("/steps") and value == 0]
        self.bad = self.bad + 1 if stuck else 0
        if self.options.max_bad and self.bad >= self.options.max_bad:
            rows = samples(records)
            raise StageError(stuck[0], iteration, len(rows), f"no finite step for {self.bad} iterations in a row (--max-bad). Rows that "
                             f"are not finite, as position.sample: {listed(rows) if rows else 'none: the gradient is not'}")

    def _missing(self, iteration: int, metrics: Mapping[str, float], records: Mapping[str, Batch]) -> None:
        rate = metrics.get("reward/missing_rate", 0.0)
        if rate <= self.options.max_missing:
            return
        causes = "; ".join(f"{cause}: {message}" for cause, message in self.reasons().items())
        rows = len(records["scores"]) if "scores" in records else 0
        raise StageError("reward", iteration, rows, f"{rate:.0%} of the rewards are missing, expected at most "
                         f"{self.options.max_missing:.0%} (--max-missing). {causes or 'the scores are NaN'}")


def samples(records: Mapping[str, Batch]) -> list[str]:
    """Rows with a value that is not finite, as ``position.sample``."""
    found: dict[str, None] = {}
    for name in WATCHED:
        if name in records:
            batch = records[name]
            found |= {f"{position}.{sample}": None for position, sample in batch.axis.keys[_bad_rows(batch, name, records)].tolist()}
    return list(found)


def _bad_rows(batch: Batch, name: str, records: Mapping[str, Batch]) -> torch.Tensor:
    data = batch.data[name]
    if data.kind.level is not Level.TOKEN:
        return ~torch.as_tensor(data.value).isfinite()
    bad = ~data.value.isfinite()
    if "mask" in records and records["mask"].axis is batch.axis:
        bad &= records["mask"].data["mask"].value
    assert data.lengths is not None
    rows = torch.arange(len(batch)).repeat_interleave(data.lengths)
    return torch.zeros(len(batch), dtype=torch.bool).index_put_((rows,), bad, accumulate=True)
