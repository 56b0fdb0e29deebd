"""The two protocols that a backend implements, and the optional ones.

A backend is a module in ``backends/`` that defines ``Trainer``, ``Generator`` or both. Each class has a
frozen dataclass ``Settings``, whose fields are the user's options (``--ROLE.NAME``), each with a comment.

A class declares abilities beyond its protocol through the fields of its ``Capabilities`` or through the
methods of an optional protocol below, which rlflow checks with ``issubclass`` or ``isinstance``. A class that
inherits these methods but doesn't support them sets one of them to None.
"""

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
    """The model that a role needs: its folder, head, device, dtype and limits."""

    folder: Path | None  # a Hugging Face model folder; None: the backend needs no folder
    head: Head = "logprobs"  # what the model computes
    trained: bool = False  # True if the model is trained, which needs an optimizer
    device: str = "cpu"  # ``cpu``, ``cuda`` or ``cuda:N``
    dtype: str = "float32"  # dtype of weights and arithmetic
    seed: int = 0  # seed for the weights of a new head
    updates: int = 0  # optimizer steps expected over the run, for learning rates that fall to 0; 0: unknown
    #: tokens of the longest possible row, which selects rotary frequencies; 0: the model's number of
    #: positions
    longest: int = 0
    # torch's group of the ranks if these are threads of one process; None: torch's default group, if it
    # exists
    group: Any = None
    # end tokens of a generator's rows; (): the end tokens that the folder's configs and tokenizer name
    ends: tuple[int, ...] = ()
    # True if its weights follow another model's: they are kept in float32, like those of a trained model
    follows: bool = False


@dataclass(frozen=True)
class Capabilities:
    """What a trainer or generator needs, and what it supports beyond its protocol. This depends on the class
    and its settings."""

    tensor: int = 1  # number of adjacent ranks that get the same rows and process these rows together
    # True if every rank of the pool must make each call, even without rows, in the same order, because each
    # rank holds a part
    collective: bool = False
    # True if its ranks may be threads of one process, because it communicates only through
    # ``ModelSpec.group``
    threads: bool = False
    # True if it can compute and keep weights in float64 when ``ModelSpec.dtype`` requests this
    float64: bool = True
    # parts that ``sleep`` can free one by one: weights, optimizer, gradient, cache
    movable: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()  # parts of its memory that exist only while they are used
    # capabilities of a trainer
    row_exact: bool = False  # True if the numbers of a row are bit-equal whatever other rows the batch has
    adapters: bool = False  # True if it trains adapters, and all other weights stay constant
    # True if, without adapters, ``weights()`` returns the trained tensors themselves, not copies
    live: bool = False
    packs: bool = False  # True if it runs a common prefix of prompts through the model only once
    # parts of its memory that are divided among the ranks; None: unknown
    divided: tuple[str, ...] | None = None
    copied: bool = False  # True if its optimizer keeps a separate copy of the weights
    flat: bool = False  # True if it divides flattened tensors
    # capabilities of a generator
    # lowest temperature above 0, and highest, at which it samples
    temperatures: tuple[float, float] = (0.0, math.inf)
    batch_tokens: int = 0  # maximum number of tokens that it accepts at once; 0: no limit
    longest: int = 0  # maximum number of tokens per row; 0: its model's maximum length
    cache_bytes: int = 0  # bytes of its cache, if settings determine this number; else 0
    # True if it can sample with the tensors of a ``live`` trainer in its process (``SharesWeights``)
    shares: bool = False


@runtime_checkable
class Declares(Protocol):
    """A class that declares its capabilities. A subclass with different ones calls ``super().capabilities``
    and replaces fields of the result."""

    def capabilities(self, settings: Any, device: str) -> Capabilities:
        """Return what the class supports with these settings on this device, ``cpu`` or ``cuda``. This is a
        class method."""


@dataclass(frozen=True)
class Sampling:
    """Options of ``generate``, such as the number of samples, lengths and temperature."""

    samples: int = 1  # responses per prompt
    max_tokens: int = 16  # longest response
    temperature: float = 1.0  # divides the logits; 0 is greedy
    top_p: float = 1.0  # samples from the smallest set of tokens with this total probability; 1: all tokens
    top_k: int = 0  # samples from this many tokens with the highest probability; 0: all tokens
    stop: tuple[str, ...] = ()  # strings that end a row; the row's text includes them
    # tokens that end a row, in addition to the model's end tokens; the row's text includes them
    stop_token_ids: tuple[int, ...] = ()
    # True: special tokens are removed from a row's text, also in the middle
    skip_special_tokens: bool = False
    min_tokens: int = 0  # a token cannot end a row before the row has this many tokens
    # recorded number of tokens of each row; the row ends after this many tokens, whatever they are; (): rows
    # end by themselves
    lengths: tuple[int, ...] = ()

    def of_rows(self, keys: Tensor) -> list[Sampling]:
        """Return the sampling options of each row. ``keys`` are the paths of the rows (``Axis.keys``).

        Without ``lengths``, all rows have the same options. With ``lengths``, each row must have exactly the
        number of tokens listed for it. The list has one number per row, in the order of the data stream, and
        repeats from the beginning when it runs out.
        """
        if not self.lengths:
            return [self] * len(keys)
        numbers = keys[:, -2] * self.samples + keys[:, -1]
        lengths = (self.lengths[number % len(self.lengths)] for number in numbers.tolist())
        return [
            replace(self, max_tokens=length, min_tokens=length, stop=(), stop_token_ids=(), lengths=())
            for length in lengths
        ]


def as_long(rows: Batch, sampling: Sampling) -> Batch:
    """Return ``rows`` unchanged, or raise ValueError if they don't have the lengths required by
    ``sampling.lengths``."""
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
    """Holds one model's weights and trains them. Each rank has one instance."""

    def __init__(self, spec: ModelSpec, settings: Any) -> None: ...

    def forward(self, batch: Batch, want: tuple[str, ...] = ("logprobs",)) -> Batch:
        """Run a forward pass and return the columns in ``want`` on the axis of ``batch``.

        ``logprobs``, ``entropy`` and ``values`` have one number per token, ``scores`` one per row. Reads
        prompt_tokens, tokens and, if present, temperature.
        """

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
        """Train on ``batch`` with ``loss`` for ``epochs`` epochs. Returns metrics by name, each a mean, or a
        maximum if its name ends in ``_max``.

        minibatch: rows per optimizer step, or None for all. mean: how loss values are averaged. seed:
        determines the order of the rows. settings: keyword arguments of the loss.
        """

    def update_shares(
        self, batch: Batch, loss: Loss, shares: Sequence[RankShare], mean: Means, settings: Mapping[str, Any]
    ) -> Learned:
        """Take part in an update across several ranks.

        ``batch`` has this rank's rows, and ``shares`` has its share of each optimizer step, which may be
        empty. Every rank takes every step. Gradients are summed over the ranks of torch's default group.
        """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the language model's weights with their Hugging Face names. rlflow's own heads are left
        out."""

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""

    def load(self, folder: Path) -> None:
        """Load weights from a folder written by ``save``."""

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to continue bit for bit, by name: ``parameters/NAME``, the optimizer
        state, and ``steps``. The tensors are live, not copies."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore a state returned by ``state``."""

    def sleep(self, *parts: str) -> None:
        """Free the memory of these parts, or of all ``movable`` ones if none are given.

        A freed part can't be used before ``wake``. Views returned by ``pieces`` stay valid, because storages
        are emptied and later filled again.
        """

    def wake(self, *parts: str) -> None:
        """Restore these freed parts bit for bit, or all of them if none are given."""


@runtime_checkable
class ForwardsAhead(Protocol):
    """A trainer that can keep a forward pass's autograd graph for its next update."""

    def forward_ahead(self, batch: Batch, want: tuple[str, ...] = ("logprobs",)) -> Batch:
        """Run ``forward``, and keep whatever the next update needs from this pass. rlflow calls this instead
        of ``forward`` if all these rows are used in the first optimizer step of the role's next update."""


@runtime_checkable
class ResizesPasses(Protocol):
    """A trainer that can limit the number of tokens in a forward or backward pass."""

    def resize_passes(self, tokens: int) -> int:
        """Limit forward and backward passes to ``tokens`` tokens, and return the previous limit."""


@runtime_checkable
class ResetsOptimizer(Protocol):
    """A trainer that can start its optimizer afresh, as ``update(…, fresh_optimizer=…)`` asks for."""

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments and its count of steps, as before the first step.

        Weights and the learning rate's schedule stay as they are. ``state`` must describe this, so that a
        restored trainer continues bit for bit. Every rank calls this.
        """


@runtime_checkable
class ShowsPieces(Protocol):
    """A trainer that shows which boxes of its weights each rank holds, so a plan can transfer them."""

    def pieces(self) -> Mapping[str, TensorViews] | None:
        """For each tensor of ``weights``, return views of this rank's boxes, by Hugging Face name.

        The views show live memory, and nothing is gathered. Returns None if ``weights`` doesn't yield the
        trained tensors themselves, as with adapters.
        """


@runtime_checkable
class ShowsMasters(Protocol):
    """A trainer whose weights can follow another trainer's, or be followed."""

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights as (Hugging Face name, tensor) pairs, with rlflow's own heads and in the precision
        in which they are kept.

        A tensor is this rank's live memory: a complete tensor, a DTensor or a ZeRO-3 partition. The weights
        of layers with adapters are merged into new, complete tensors. A tied weight is yielded only once. If
        weights are divided over ranks, every rank must iterate to the end.
        """


class Generator(Protocol):
    """Samples responses with a copy of the weights that a trainer trains."""

    def __init__(self, spec: ModelSpec, settings: Any) -> None: ...

    def generate(self, prompts: Batch, sampling: Sampling, seeds: Sequence[int]) -> Batch:
        """Sample ``sampling.samples`` responses to each prompt. ``seeds`` has one number per response.

        Returns tokens, mask, completion, finish, sampled_logprobs, temperature and policy_version on the axis
        ``prompts.axis.repeat(samples)``. A row's tokens depend only on its prompt, its seed and the weights,
        and a smaller ``max_tokens`` cuts the same tokens off earlier. Raises PlanError before sampling if the
        model doesn't have enough positions for a prompt and ``max_tokens``.
        """

    def receive(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace the weights with new ones, given as (Hugging Face name, tensor) pairs. ``version`` is the
        number of updates that they contain."""

    def sleep(self, *parts: str) -> None:
        """Free the memory of these parts (weights, cache), like ``Trainer.sleep``."""

    def wake(self, *parts: str) -> None:
        """Restore these freed parts, like ``Trainer.wake``."""


@runtime_checkable
class GivesChunks(Protocol):
    """A generator that can return rows in chunks before all rows have ended."""

    def generate_chunks(
        self, prompts: Batch, sampling: Sampling, seeds: Sequence[int], chunks: int
    ) -> Iterator[Batch]:
        """Yield the rows of ``generate``, bit for bit the same, in ``chunks`` batches, each as soon as all
        its rows have ended.

        The axis of a batch is a selection from ``prompts.axis.repeat(samples)``. Which rows are in a chunk
        depends only on the sampled tokens, never on timing. Use ``rlflow.training.chunks`` to split the rows.
        """


@runtime_checkable
class ScoresTokens(Protocol):
    """A generator that can compute log-probs of tokens it didn't sample."""

    def logprobs(self, batch: Batch) -> Batch:
        """Return the column ``logprobs`` of the given tokens under the generator's weights, in the same form
        as ``Trainer.forward``."""


@runtime_checkable
class SharesWeights(Protocol):
    """A generator that can sample with a trainer's own tensors.

    A class that implements this must also set ``Capabilities.shares``. Having ``share`` isn't enough, because
    a subclass may inherit it and override ``receive``.
    """

    def share(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Sample directly with these tensors from now on, in their dtype. They are trained by a trainer in
        the same process.

        rlflow still calls ``receive`` after each update, although the generator already uses the new weights
        by then.
        """


@runtime_checkable
class ShowsDestinations(Protocol):
    """A generator that shows where in its memory each weight is, so a transfer plan can write there."""

    def destinations(self, tensors: Mapping[str, Spread]) -> Destinations:
        """Return where in the generator's memory each of these tensors must be written."""

    def writing(self, version: int) -> AbstractContextManager[None]:
        """Let a ``with`` block write into the memory of ``destinations``, with sampling blocked. When the
        block ends, the weights have this version."""

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load weights, given as (Hugging Face name, tensor) pairs, with the engine's own loader."""


Metrics = Mapping[str, float]
