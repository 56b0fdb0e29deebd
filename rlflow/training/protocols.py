"""The two protocols of a backend, and the optional ones.

A backend is one module in ``backends/`` that defines ``Trainer``, ``Generator`` or both. Each class has a
frozen dataclass ``Settings`` with the options of a user (``--ROLE.NAME``); every field has a comment.

A class declares each ability beyond its protocol in one place: in a field of the ``Capabilities`` that it
returns, or by having the methods of an optional protocol below. Optional protocols are checked with
``issubclass`` or ``isinstance``. If a class inherits such methods without supporting them, it sets one of
them to None."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.author.loss import Loss
from rlflow.training.learning import Learned, RankShare
from rlflow.training.objective import Means
from rlflow.training.weight_sync.layout import Spread
from rlflow.training.weight_sync.proof import Destinations
from rlflow.training.weight_sync.shards import TensorViews

Head = Literal["logprobs", "values", "scores"]


@dataclass(frozen=True)
class ModelSpec:
    """The model that a role needs."""

    folder: Path | None  # a Hugging Face model folder; None: the backend needs none
    head: Head = "logprobs"  # what the model computes
    trained: bool = False  # whether an optimizer is needed
    device: str = "cpu"  # ``cpu``, ``cuda`` or ``cuda:N``
    dtype: str = "float32"  # of weights and arithmetic
    seed: int = 0  # for the weights of a new head
    updates: int = 0  # optimizer steps expected over the run, for schedules that end; 0: unknown
    #: tokens of the longest possible row, which selects rotary frequencies; 0: the model's number of
    #: positions
    longest: int = 0
    # torch's group of the ranks if they are threads of one process; None: torch's default group, if there is
    # one
    group: Any = None
    # tokens at which a generator ends a row; (): the tokens that the folder's configs and tokenizer name
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Capabilities:
    """What a trainer or generator supports beyond its protocol, and what it needs. This depends on its class
    and its settings."""

    tensor: int = 1  # number of adjacent ranks that get the same rows and compute them together
    # every rank of the pool joins each call, with or without rows, in one order: each holds a part
    collective: bool = False
    # its ranks may be threads of one process: it communicates only through ``ModelSpec.group``
    threads: bool = False
    float64: bool = True  # it computes and keeps weights in float64 if ``ModelSpec.dtype`` requests it
    # parts that ``sleep`` can free one by one: weights, optimizer, gradient, cache
    movable: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()  # parts that are in memory only while they are used
    # of a trainer
    row_exact: bool = False  # the numbers of a row are bit-equal for any other rows in the batch
    adapters: bool = False  # it trains adapters; the other weights stay constant
    live: bool = False  # ``weights()`` returns the trained tensors, not copies, if it trains no adapters
    packs: bool = False  # it computes a common prefix of prompts once
    # parts of its memory that are divided among ranks; None: its memory use is unknown
    divided: tuple[str, ...] | None = None
    copied: bool = False  # its optimizer keeps its own copy of the weights
    flat: bool = False  # it divides flattened tensors
    # of a generator
    temperatures: tuple[float, float] = (0.0, math.inf)  # lowest above 0 and highest that it samples at
    batch_tokens: int = 0  # most tokens that it takes at once; 0: no limit
    longest: int = 0  # most tokens per row; 0: as many as its model has positions
    cache_bytes: int = 0  # size of its cache, if settings determine it
    # it can sample with the tensors of a ``live`` trainer in its process (``SharesWeights``)
    shares: bool = False


@runtime_checkable
class Declares(Protocol):
    """A class that declares its capabilities. A subclass with more of them calls ``super().capabilities`` and
    replaces fields."""

    def capabilities(self, settings: Any, device: str) -> Capabilities:
        """Return what the class supports with these settings (a class method). ``device``: cpu or cuda."""


@dataclass(frozen=True)
class Sampling:
    """How ``generate`` samples."""

    samples: int = 1  # responses per prompt
    max_tokens: int = 16  # longest response
    temperature: float = 1.0  # divides the logits; 0 is greedy
    top_p: float = 1.0  # smallest set of tokens with this probability; 1: all tokens
    top_k: int = 0  # tokens of highest probability; 0: all tokens
    stop: tuple[str, ...] = ()  # strings that end a row; its text includes them
    # tokens that end a row, in addition to the model's; its text includes them
    stop_token_ids: tuple[int, ...] = ()
    # whether to remove special tokens from the text of a row, also inside it
    skip_special_tokens: bool = False
    min_tokens: int = 0  # no token ends a row before this many
    # a recorded list with the number of tokens of each row, whatever is sampled; (): rows end by themselves
    lengths: tuple[int, ...] = ()

    def of_rows(self, keys: Tensor) -> list[Sampling]:
        """Return how each row is sampled, by the keys of their axis [rows, 2 or more].

        With ``lengths``, a row's number of tokens is both its minimum and its maximum. The list has one
        number per row, in the order of the data stream from its beginning. After its end it starts again."""
        if not self.lengths:
            return [self] * len(keys)
        numbers = keys[:, -2] * self.samples + keys[:, -1]
        lengths = (self.lengths[number % len(self.lengths)] for number in numbers.tolist())
        return [
            replace(self, max_tokens=length, min_tokens=length, stop=(), stop_token_ids=(), lengths=())
            for length in lengths
        ]


def as_long(rows: Batch, sampling: Sampling) -> Batch:
    """Return the rows of a generator after checking their lengths. Raises ValueError if they differ from the
    lengths that ``sampling`` prescribes."""
    if sampling.lengths:
        lengths = rows.data["tokens"].row_lengths
        expected = [each.max_tokens for each in sampling.of_rows(rows.axis.keys)]
        if lengths.tolist() != expected:
            raise ValueError(
                f"generate: found rows of {lengths.tolist()} tokens, expected the lengths of the recorded "
                f"list: {expected}"
            )
    return rows


class Trainer(Protocol):
    """Holds and trains the weights of one model; one instance per rank."""

    def __init__(self, spec: ModelSpec, settings: Any) -> None: ...

    def forward(self, batch: Batch, want: tuple[str, ...] = ("logprobs",)) -> Batch:
        """Return the columns in ``want`` (logprobs, entropy, values: token level; scores: row level),
        computed from prompt_tokens, tokens and, if present, temperature. Same axis as ``batch``."""

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
        """Train on minibatches with ``loss``, in an order drawn from ``seed``. Return metrics: means over the
        rows, or maxima for ``_max``."""

    def update_shares(
        self, batch: Batch, loss: Loss, shares: Sequence[RankShare], mean: Means, settings: Mapping[str, Any]
    ) -> Learned:
        """Take one rank's part of an update: its rows, and its share of each optimizer step, which may be
        empty. Every rank takes every step. Gradients are summed over the ranks of torch's default group."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) of the language model, without rlflow's own heads."""

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder."""

    def load(self, folder: Path) -> None:
        """Read weights from a folder that ``save`` has written."""

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that a bit-equal continuation needs, by name: ``parameters/NAME``, optimizer
        state, ``steps``. They are the live tensors."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Load a state that ``state`` returned."""

    def sleep(self, *parts: str) -> None:
        """Free the memory of these parts, or of all ``movable`` ones. A freed part is not used before
        ``wake``. The views that ``pieces`` returned stay valid: storages are emptied and filled again."""

    def wake(self, *parts: str) -> None:
        """Restore freed parts, bit for bit."""


@runtime_checkable
class ForwardsAhead(Protocol):
    """A trainer whose next update can continue from a forward."""

    def forward_ahead(self, batch: Batch, want: tuple[str, ...] = ("logprobs",)) -> Batch:
        """Do ``forward`` and keep what the next update needs. It is called instead of ``forward`` if the
        role's next update takes all these rows in its first step."""


@runtime_checkable
class ResizesPasses(Protocol):
    """A trainer that can reduce the size of its passes."""

    def resize_passes(self, tokens: int) -> int:
        """Compute at most this many tokens in a pass from now on. Return the previous limit."""


@runtime_checkable
class ShowsPieces(Protocol):
    """A trainer that shows which boxes of its weights a rank holds, for a transfer plan."""

    def pieces(self) -> Mapping[str, TensorViews] | None:
        """Return this rank's boxes in live memory, by Hugging Face name of each tensor of ``weights``.
        Nothing is gathered. None if the trained tensors are not such weights (adapters)."""


class Generator(Protocol):
    """Samples from a model that a trainer trains."""

    def __init__(self, spec: ModelSpec, settings: Any) -> None: ...

    def generate(self, prompts: Batch, sampling: Sampling, seeds: Sequence[int]) -> Batch:
        """Sample ``sampling.samples`` responses for each prompt.

        Returns tokens, mask, completion, finish, sampled_logprobs, temperature and policy_version over
        ``prompts.axis.repeat(samples)``. ``seeds`` has one number per row. A row's tokens depend only on its
        prompt and its seed: with a smaller ``max_tokens``, a row is the same, cut off. Before sampling,
        raises PlanError if the model has too few positions for a prompt and ``max_tokens``."""

    def receive(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Take new weights; ``version`` is the number of updates that produced them."""

    def sleep(self, *parts: str) -> None:
        """Free the memory of parts (weights, cache), as a trainer's ``sleep`` does."""

    def wake(self, *parts: str) -> None:
        """Restore freed parts."""


@runtime_checkable
class GivesChunks(Protocol):
    """A generator that returns rows in chunks."""

    def generate_chunks(
        self, prompts: Batch, sampling: Sampling, seeds: Sequence[int], chunks: int
    ) -> Iterator[Batch]:
        """Yield the rows of ``generate``, bit for bit, in ``chunks`` batches. Each batch comes as soon as its
        last row has ended. Their axes are taken from ``prompts.axis.repeat(samples)``. The rows of a chunk
        depend on the sampled tokens, never on timing; see ``rlflow.training.chunks``."""


@runtime_checkable
class ScoresTokens(Protocol):
    """A generator that can score tokens that it did not sample."""

    def logprobs(self, batch: Batch) -> Batch:
        """Return `logprobs` of given tokens under the weights that it samples with, as ``Trainer.forward``
        does."""


@runtime_checkable
class SharesWeights(Protocol):
    """A generator that can sample with a trainer's own tensors. Having ``share`` is not enough, because a
    subclass may change ``receive``: the class must also set ``Capabilities.shares``."""

    def share(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Sample from now on with these tensors themselves, in their dtype. A trainer in the same process
        trains them. ``receive`` is called as before, and finds them already in place."""


@runtime_checkable
class ShowsDestinations(Protocol):
    """A generator that shows where its memory holds each weight, so that a plan can write there."""

    def destinations(self, tensors: Mapping[str, Spread]) -> Destinations:
        """Return where in its memory each of these tensors belongs."""

    def writing(self, version: int) -> AbstractContextManager[None]:
        """Return a context that permits writing that memory and blocks sampling. After the context, the
        weights have this version."""

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Write weights with its own loader."""


Metrics = Mapping[str, float]
