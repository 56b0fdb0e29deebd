"""The two protocols of a backend. A backend is one module in ``backends/`` that defines ``Trainer``,
``Generator`` or both, each with a frozen dataclass ``Settings`` of what a user may set (``--ROLE.NAME``),
every field commented.

Whatever a class can do beyond its protocol is said once: by a field of the ``Capabilities`` that it returns,
or by having the methods of one of the optional protocols below. An optional protocol is checked with
``issubclass`` or ``isinstance``; a class that inherits its methods and cannot do it sets one of them to
None."""

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
    seed: int = 0  # of a new head's weights
    updates: int = 0  # optimizer steps expected over the run, for schedules that end; 0: unknown
    #: tokens of the longest row that can come, by which rotary frequencies are chosen; 0: as many as the
    #: model has positions
    longest: int = 0
    # torch's group of the ranks, where they are threads of one process; None: torch's default group, if there
    # is one
    group: Any = None
    # the tokens at which a generator ends a row; (): those that the folder's configs and its tokenizer name
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Capabilities:
    """What a trainer or generator can do beyond its protocol, and what it needs, by its class and its
    settings."""

    tensor: int = 1  # adjacent ranks that get the same rows and compute them together
    # every rank of the pool takes part in each call, with or without rows, in one order: each holds a part
    collective: bool = False
    # its ranks may be threads of one process: it computes together by ``ModelSpec.group`` alone
    threads: bool = False
    float64: bool = True  # it computes and keeps weights in float64 if ``ModelSpec.dtype`` says so
    # parts that ``sleep`` frees, each apart: weights, optimizer, gradient, cache
    movable: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()  # parts that are in memory while they are used, and not otherwise
    # of a trainer
    row_exact: bool = False  # numbers of a row are the same bits whichever rows are computed with it
    adapters: bool = False  # it trains adapters in addition to weights that stay as they are
    live: bool = False  # ``weights()`` are the tensors that it trains and no copies, if it trains no adapters
    packs: bool = False  # it computes once what prompts begin with alike
    # parts of its memory that ranks divide; None: nothing is known of its memory
    divided: tuple[str, ...] | None = None
    copied: bool = False  # its optimizer has weights of its own in addition to the model's
    flat: bool = False  # it divides flattened tensors
    # of a generator
    temperatures: tuple[float, float] = (0.0, math.inf)  # lowest above 0 and highest that it samples at
    batch_tokens: int = 0  # tokens that it takes at once; 0: all
    longest: int = 0  # tokens of a row that it takes at most; 0: as many as its model
    cache_bytes: int = 0  # of its cache, if settings say how large it is
    # it can sample with the tensors of a ``live`` trainer of its process (``SharesWeights``)
    shares: bool = False


@runtime_checkable
class Declares(Protocol):
    """A class that returns what it can do. A subclass that adds to what it inherits calls
    ``super().capabilities`` and replaces fields."""

    def capabilities(self, settings: Any, device: str) -> Capabilities:
        """A class method: what the class can do with these settings. ``device``: cpu or cuda."""


@dataclass(frozen=True)
class Sampling:
    """How ``generate`` samples."""

    samples: int = 1  # responses per prompt
    max_tokens: int = 16  # longest response
    temperature: float = 1.0  # by which logits are divided; 0 is greedy
    top_p: float = 1.0  # smallest set of tokens with this probability; 1: all tokens
    top_k: int = 0  # tokens of highest probability; 0: all tokens
    stop: tuple[str, ...] = ()  # strings that end a row, and are kept in it
    # tokens that end a row beside those of the model, and are kept in its text
    stop_token_ids: tuple[int, ...] = ()
    # whether the text of a row is without special tokens, also of those that are inside it
    skip_special_tokens: bool = False
    min_tokens: int = 0  # this many tokens come first that end no row
    # a recorded list that says how many tokens each row has, whatever is sampled; (): rows end by themselves
    lengths: tuple[int, ...] = ()

    def of_rows(self, keys: Tensor) -> list[Sampling]:
        """How each row is sampled, by the keys of their axis [rows, 2 or more]: with ``lengths`` as many
        tokens at least as at most. The list has one number for each row in the order of the data stream, from
        its beginning, and begins again where it ends."""
        if not self.lengths:
            return [self] * len(keys)
        numbers = keys[:, -2] * self.samples + keys[:, -1]
        lengths = (self.lengths[number % len(self.lengths)] for number in numbers.tolist())
        return [
            replace(self, max_tokens=length, min_tokens=length, stop=(), stop_token_ids=(), lengths=())
            for length in lengths
        ]


def as_long(rows: Batch, sampling: Sampling) -> Batch:
    """Rows that a generator gave. Raises ValueError where ``sampling`` says how long they are and they are
    not."""
    if sampling.lengths:
        lengths = rows.data["tokens"].row_lengths
        expected = [each.max_tokens for each in sampling.of_rows(rows.axis.keys)]
        if lengths.tolist() != expected:
            raise ValueError(
                f"generate: found rows of {lengths.tolist()} tokens, expected those of the recorded "
                f"list: {expected}"
            )
    return rows


class Trainer(Protocol):
    """Holds one model's weights and learns; one instance per rank."""

    def __init__(self, spec: ModelSpec, settings: Any) -> None: ...

    def forward(self, batch: Batch, want: tuple[str, ...] = ("logprobs",)) -> Batch:
        """Columns of ``want`` (logprobs, entropy, values: token level; scores: row level) from prompt_tokens,
        tokens and, where present, temperature. Same axis as ``batch``."""

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
        """Minibatches of ``loss`` in an order drawn from ``seed``; metrics are means over the rows seen,
        ``_max`` maxima."""

    def update_shares(
        self, batch: Batch, loss: Loss, shares: Sequence[RankShare], mean: Means, settings: Mapping[str, Any]
    ) -> Learned:
        """One rank's part of an update: its rows, and of each optimizer step its share, which may be empty.
        Every rank takes every step; gradients are summed over the ranks of torch's default group."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of the language model, without heads of our own."""

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder."""

    def load(self, folder: Path) -> None:
        """Read weights from a folder that ``save`` wrote."""

    def state(self) -> dict[str, Tensor]:
        """Everything that a bit-equal continuation needs, by name: ``parameters/NAME``, optimizer state,
        ``steps``. Live tensors."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from what ``state`` gave."""

    def sleep(self, *parts: str) -> None:
        """Free the memory of these parts, or of all that are ``movable``. Nothing asleep is used before
        ``wake``. What ``pieces`` has shown stays good: storages are emptied and filled again."""

    def wake(self, *parts: str) -> None:
        """Bring them back, bit for bit."""


@runtime_checkable
class ForwardsAhead(Protocol):
    """A trainer whose next update can continue from a forward."""

    def forward_ahead(self, batch: Batch, want: tuple[str, ...] = ("logprobs",)) -> Batch:
        """``forward``, called in its place if the role's next update takes all of these rows in its first
        step."""


@runtime_checkable
class ResizesPasses(Protocol):
    """A trainer whose passes can be made smaller."""

    def resize_passes(self, tokens: int) -> int:
        """Compute at most so many tokens in a pass from now on. Gives the number until now."""


@runtime_checkable
class ShowsPieces(Protocol):
    """A trainer that shows which boxes of its weights a rank holds, so that a plan can move them."""

    def pieces(self) -> Mapping[str, TensorViews] | None:
        """By Hugging Face name of each tensor of ``weights`` the boxes that this rank holds, in live memory,
        nothing gathered; None if what is trained is no such tensor (adapters)."""


class Generator(Protocol):
    """Samples from a model that someone else trains."""

    def __init__(self, spec: ModelSpec, settings: Any) -> None: ...

    def generate(self, prompts: Batch, sampling: Sampling, seeds: Sequence[int]) -> Batch:
        """tokens, mask, completion, finish, sampled_logprobs, temperature, policy_version over
        ``prompts.axis.repeat(samples)``; ``seeds`` has one number per row, and a row's tokens depend on its
        prompt and its seed alone: one with a smaller ``max_tokens`` is the same row, cut. Raises PlanError,
        before anything is sampled, if the model has no positions for a prompt and ``max_tokens``."""

    def receive(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Take new weights; ``version`` is the number of updates behind them."""

    def sleep(self, *parts: str) -> None:
        """Take parts out of memory, as a trainer's ``sleep`` does: weights and cache."""

    def wake(self, *parts: str) -> None:
        """Bring parts back into memory."""


@runtime_checkable
class GivesChunks(Protocol):
    """A generator that gives rows chunk by chunk."""

    def generate_chunks(
        self, prompts: Batch, sampling: Sampling, seeds: Sequence[int], chunks: int
    ) -> Iterator[Batch]:
        """The rows of ``generate``, bit for bit, in ``chunks`` batches, each as soon as its last row has
        ended. Their axes are taken from one, ``prompts.axis.repeat(samples)``. Which rows a chunk has depends
        on what is sampled, never on timing; ``rlflow.training.chunks`` says how."""


@runtime_checkable
class ScoresTokens(Protocol):
    """A generator that scores tokens which it did not sample."""

    def logprobs(self, batch: Batch) -> Batch:
        """`logprobs` of given tokens with the weights that it samples with, as ``Trainer.forward`` gives
        them."""


@runtime_checkable
class SharesWeights(Protocol):
    """A generator that can sample with a trainer's own tensors. Having ``share`` is not enough, since a
    subclass may change what ``receive`` does: the class says so with ``Capabilities.shares``."""

    def share(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Sample from now on with these tensors themselves, which a trainer of the same process trains, in
        the dtype that it samples in. ``receive`` is called as before, and finds them in their place."""


@runtime_checkable
class ShowsDestinations(Protocol):
    """A generator that shows where in its memory weights belong, so that a plan can write them there."""

    def destinations(self, tensors: Mapping[str, Spread]) -> Destinations:
        """Where in its memory each of these tensors belongs."""

    def writing(self, version: int) -> AbstractContextManager[None]:
        """A context in which that memory may be written and nothing is sampled; afterwards these are the
        weights of this version."""

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Write weights by its own loader."""


Metrics = Mapping[str, float]
