"""A backend without a model, for testing the engine.

Its columns are functions of the row keys, so a lost, duplicated or reordered row changes a digest. Its calls
take as long as its settings say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from rlflow.author.batch import Batch, Data
from rlflow.author.columns import Kind, Level, standard_kind
from rlflow.author.loss import Loss
from rlflow.author.seeds import derived, row_seeds
from rlflow.training.chunks import chunked
from rlflow.training.learning import Learned, OptimizerStep, Passes, RankShare, learn, learn_shares
from rlflow.training.objective import Means, New
from rlflow.training.peers import Peers
from rlflow.training.protocols import Capabilities, ModelSpec, Sampling

VOCABULARY = 256


def numbers(name: str, batch: Batch, width: int) -> Tensor:
    """Return float32 [rows, width] in [0, 1) that depend only on ``name``, the row key and the position in
    the row.

    If rows have a prompt, positions count from the prompt's first token, so each turn gets different numbers.
    """
    seeds = torch.tensor(row_seeds(derived(name), batch.axis.keys), dtype=torch.int64)
    prompt = batch.data["prompt_tokens"].lengths if "prompt_tokens" in batch else None
    places = torch.arange(1, width + 1) + (0 if prompt is None else prompt[:, None])
    mixed = (seeds[:, None] % (2**31)) * 2_654_435_761 + places * 40_503
    mixed = (mixed ^ (mixed >> 15)) * 2_246_822_519
    return ((mixed ^ (mixed >> 13)) % 65_521).float() / 65_521


def token_numbers(name: str, batch: Batch) -> Data:
    """Return the negated ``numbers``, in (-1, 0], as a token column."""
    lengths = batch.data["tokens"].row_lengths
    width = int(lengths.max()) if len(lengths) else 0
    return Data.trimmed(Kind(Level.TOKEN, "float32"), -numbers(name, batch, width), batch.axis, lengths)


class Trainer:
    """A trainer without a model, whose calls take as long as its settings say. ``steps`` counts optimizer
    steps."""

    @dataclass(frozen=True)
    class Settings:
        """How long each call takes."""

        forward_seconds: Annotated[float, Ge(0)] = 0.0  # seconds per forward
        row_seconds: Annotated[float, Ge(0)] = 0.0  # additional seconds per row of a forward
        update_seconds: Annotated[float, Ge(0)] = 0.0  # seconds per update

    defaults: ClassVar[Settings] = Settings()

    @classmethod
    def capabilities(cls, settings: Settings, device: str) -> Capabilities:
        """Return the trainer's capabilities. Its ranks can be threads, but those of a subclass can't."""
        return Capabilities(row_exact=True, threads=cls is Trainer)

    def __init__(self, spec: ModelSpec, settings: Settings = defaults) -> None:
        self.spec, self.settings = spec, settings
        # optimizer steps; if the weights follow another model's, a number between those that it had
        self.count = torch.zeros((), dtype=torch.float64 if spec.follows else torch.int64)
        self.device = torch.device("cpu")
        self.peers = Peers(spec.group)

    @property
    def steps(self) -> int:
        """The number of optimizer steps."""
        return int(self.count)

    def forward(self, batch: Batch, want: tuple[str, ...] = ("logprobs",)) -> Batch:
        """Return columns computed from the row keys, after waiting for the time in the settings."""
        _take(self.settings.forward_seconds + self.settings.row_seconds * len(batch))
        return Batch(batch.axis, {name: self._column(name, batch) for name in want})

    def _column(self, name: str, batch: Batch) -> Data:
        if name == "scores":
            return Data(Kind(Level.ROW, "float32"), _row_numbers(name, batch))
        return token_numbers(name, batch)

    def update(
        self,
        batch: Batch,
        loss: Loss,
        *,
        epochs: int = 1,
        minibatch: int | None = None,
        mean: Means = "tokens",
        seed: int = 0,
        **settings: Any,
    ) -> dict[str, float]:
        """Call the loss on each micro-batch, count the optimizer steps, and return metrics, after waiting for
        the time in the settings."""
        _take(self.settings.update_seconds)
        return learn(self, batch, loss, settings, Passes(epochs, minibatch, mean, seed))

    def update_shares(
        self, batch: Batch, loss: Loss, shares: Sequence[RankShare], mean: Means, settings: Mapping[str, Any]
    ) -> Learned:
        """Like ``update``, for one rank's shares of an update across several ranks."""
        _take(self.settings.update_seconds)
        return learn_shares(self, batch, loss, settings, Passes(mean=mean), shares)

    def reset_optimizer(self) -> None:
        """Do nothing, since there's no optimizer."""

    def compute(self, rows: Batch, want: tuple[str, ...]) -> New:
        """Return the quantities that the loss needs, computed from the row keys."""
        columns = {name: self._column(name, rows).padded(rows.axis) for name in want}
        return New(**{name: columns.get(name) for name in ("logprobs", "entropy", "values", "scores")})

    def backward(self, objective: Tensor) -> None:
        """Do nothing, since there are no weights."""

    def idle(self, want: tuple[str, ...]) -> None:
        """Do nothing, since ranks don't run in lockstep."""

    def step(self) -> OptimizerStep:
        """Count an optimizer step and report it as applied."""
        self.count += 1
        return OptimizerStep(True, 0.0, 0.0)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield a single tensor, ``steps``, with the number of optimizer steps."""
        yield "steps", self.count.clone()

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the number of optimizer steps, as live memory."""
        yield "steps", self.count

    def save(self, folder: Path) -> None:
        """Write the number of optimizer steps to a text file."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "null.txt").write_text(f"{self.steps} optimizer steps of no model\n")

    def load(self, folder: Path) -> None:
        """Read the number of optimizer steps from a folder written by ``save``."""
        self.count.fill_(int((folder / "null.txt").read_text().split()[0]))

    def state(self) -> dict[str, Tensor]:
        """Return the number of optimizer steps, the only state there is."""
        return {"parameters/steps": self.count.clone()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the number of optimizer steps from a state returned by ``state``."""
        self.count.copy_(state["parameters/steps"])

    def sleep(self, *parts: str) -> None:
        """Do nothing, since there's no memory to free."""

    def wake(self, *parts: str) -> None:
        """Do nothing, since nothing was freed."""


class Generator:
    """A generator without a model. Each response is computed from the row key. It has 1 to ``longest`` tokens
    and is cut off at ``max_tokens``."""

    @dataclass(frozen=True)
    class Settings:
        """How long sampling takes, and how long responses are."""

        generate_seconds: Annotated[float, Ge(0)] = 0.0  # seconds per call of generate
        # additional seconds per token of the longest response
        token_seconds: Annotated[float, Ge(0)] = 0.0
        # tokens of the longest response, unless max_tokens is smaller
        longest: Annotated[int, Ge(1)] = 4096
        # lengths are longest times a uniform number to this power: above 1, few responses are long
        tail: Annotated[float, Ge(0)] = 4.0

    defaults: ClassVar[Settings] = Settings()

    @classmethod
    def capabilities(cls, settings: Settings, device: str) -> Capabilities:
        """Return the generator's capabilities. Its ranks can be threads, but those of a subclass can't."""
        return Capabilities(threads=cls is Generator)

    def __init__(self, spec: ModelSpec, settings: Settings = defaults) -> None:
        self.spec, self.settings, self.version = spec, settings, 0

    def generate(self, prompts: Batch, sampling: Sampling, seeds: Sequence[int]) -> Batch:
        """Return tokens computed from the row keys, after waiting for the time in the settings. Seeds are
        ignored."""
        sampled = self._responses(prompts, sampling)
        _take(
            self.settings.generate_seconds
            + self.settings.token_seconds * max(sampled.data["tokens"].row_lengths.tolist(), default=0)
        )
        return sampled

    def generate_chunks(
        self, prompts: Batch, sampling: Sampling, seeds: Sequence[int], chunks: int
    ) -> Iterator[Batch]:
        """Yield the rows of ``generate`` in ``chunks`` batches, shortest rows first, as if all rows grew one
        token at a time."""
        sampled = self._responses(prompts, sampling)
        lengths = sampled.data["tokens"].row_lengths.tolist()

        def ended() -> Iterator[Tensor]:
            _take(self.settings.generate_seconds)
            steps = sorted(set(lengths))
            for before, step in zip([0, *steps], steps, strict=False):
                _take(self.settings.token_seconds * (step - before))
                yield torch.tensor([row for row, length in enumerate(lengths) if length == step])

        for rows in chunked(ended(), len(sampled), chunks):
            yield sampled.rows(rows)

    def _responses(self, prompts: Batch, sampling: Sampling) -> Batch:
        rows = prompts.repeat(sampling.samples)
        keys = rows.axis.keys
        lengths = 1 + (_row_numbers("length", rows) ** self.settings.tail * self.settings.longest).long()
        # whether a row ends by itself, possibly at its last permitted token
        stopped = lengths <= sampling.max_tokens
        lengths = lengths.clamp(max=sampling.max_tokens)
        if sampling.lengths:
            lengths = torch.tensor([each.max_tokens for each in sampling.of_rows(rows.axis.keys)])
        tokens = (numbers("tokens", rows, sampling.max_tokens) * VOCABULARY).long()
        tokens = tokens[torch.arange(sampling.max_tokens) < lengths[:, None]]
        columns: dict[str, Any] = {
            "tokens": tokens,
            "mask": torch.ones_like(tokens, dtype=torch.bool),
            "policy_version": torch.full_like(tokens, self.version),
        }
        data = {name: Data(standard_kind(name), value, lengths) for name, value in columns.items()}  # type: ignore[arg-type]
        stopped &= not sampling.lengths  # a prescribed length is not the row's own end
        data["completion"] = Data(Kind(Level.TEXT), tuple(".".join(map(str, path)) for path in keys.tolist()))
        data["finish"] = Data(
            Kind(Level.TEXT), tuple("stop" if own else "length" for own in stopped.tolist())
        )
        data["temperature"] = Data(
            Kind(Level.ROW, "float32"), torch.full((len(rows),), sampling.temperature or 1.0)
        )
        data["group"] = rows.data["group"]
        prompted = {"prompt_tokens": rows.data["prompt_tokens"]}
        data["sampled_logprobs"] = token_numbers("logprobs", Batch(rows.axis, data | prompted))
        return Batch(rows.axis, data)

    def receive(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Record the version of the weights. The weights themselves aren't kept."""
        self.version = version

    def sleep(self, *parts: str) -> None:
        """Do nothing, since there's no memory to free."""

    def wake(self, *parts: str) -> None:
        """Do nothing, since nothing was freed."""


class Score:
    """A reward that gives each row key a fixed number in [0, 1)."""

    def __call__(self, batch: Batch) -> tuple[Tensor, Mapping[str, Any]]:
        """Return each row's score, and no metrics."""
        return _row_numbers("scores", batch), {}


def _row_numbers(name: str, batch: Batch) -> Tensor:
    """Return float32 [rows] in [0, 1) that depend only on ``name`` and the row key."""
    return numbers(name, Batch(batch.axis, {}), 1)[:, 0]


def _take(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)
