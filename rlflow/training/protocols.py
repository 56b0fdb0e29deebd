"""The two protocols of a backend. A backend is one module in ``backends/`` that defines ``Trainer``, ``Generator`` or both,
each with a frozen dataclass ``Settings`` of what a user may set (``--ROLE.NAME``), every field commented."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.author.loss import Loss
from rlflow.training.learning import Learned, RankShare
from rlflow.training.objective import Means

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
    #: (tensor, dimension) for tensors that a sharding trainer should cut along another dimension than the first
    dims: tuple[tuple[str, int], ...] = ()
    outer: bool = False  # whether the ranks of a generator that share a model are not adjacent: of n such groups each has every n-th
    #: tokens of the longest row that can come, by which rotary frequencies are chosen; 0: as many as the model has positions
    longest: int = 0
    group: Any = None  # torch's group of the ranks, where they are threads of one process; None: torch's default group, if there is one
    ends: tuple[int, ...] = ()  # the tokens at which a generator ends a row; (): those that the folder's configs and its tokenizer name


@dataclass(frozen=True)
class Sampling:
    """How ``generate`` samples."""

    samples: int = 1  # responses per prompt
    max_tokens: int = 16  # longest response
    temperature: float = 1.0  # by which logits are divided; 0 is greedy
    top_p: float = 1.0  # smallest set of tokens with this probability; 1: all tokens
    top_k: int = 0  # tokens of highest probability; 0: all tokens
    stop: tuple[str, ...] = ()  # strings that end a row, and are kept in it
    stop_token_ids: tuple[int, ...] = ()  # tokens that end a row beside those of the model, and are kept in its text
    skip_special_tokens: bool = False  # whether the text of a row is without special tokens, also of those that are inside it
    min_tokens: int = 0  # this many tokens come first that end no row
    lengths: tuple[int, ...] = ()  # a recorded list that says how many tokens each row has, whatever is sampled; (): rows end by themselves

    def of_rows(self, keys: Tensor) -> list[Sampling]:
        """How each row is sampled, by the keys of their axis [rows, 2 or more]: with ``lengths`` as many tokens at least as at most. The
        list has one number for each row in the order of the data stream, from its beginning, and begins again where it ends."""
        if not self.lengths:
            return [self] * len(keys)
        numbers = keys[:, -2] * self.samples + keys[:, -1]
        lengths = (self.lengths[number % len(self.lengths)] for number in numbers.tolist())
        return [replace(self, max_tokens=length, min_tokens=length, stop=(), stop_token_ids=(), lengths=()) for length in lengths]


def as_long(rows: Batch, sampling: Sampling) -> Batch:
    """Rows that a generator gave. Raises ValueError where ``sampling`` says how long they are and they are not."""
    if sampling.lengths:
        lengths = rows.data["tokens"].lengths
        assert lengths is not None
        expected = [each.max_tokens for each in sampling.of_rows(rows.axis.keys)]
        if lengths.tolist() != expected:
            raise ValueError(f"generate: found rows of {lengths.tolist()} tokens, expected those of the recorded list: {expected}")
    return rows


class Trainer(Protocol):
    """Holds one model's weights and learns; one instance per rank.

    One whose ranks hold a part of the weights each says so by ``collective = True`` on its class: every rank of its pool then takes part
    in each call, also one that has no rows for it, in the same order on all. Where its settings have ``tensor_parallel``, that many
    adjacent ranks get the same rows and give the same results."""

    def __init__(self, spec: ModelSpec, settings: Any) -> None: ...

    def forward(self, batch: Batch, want: tuple[str, ...] = ("logprobs",)) -> Batch:
        """Columns of ``want`` (logprobs, entropy, values: token level; scores: row level) from prompt_tokens, tokens and, where
        present, temperature. Same axis as ``batch``.

        A trainer may also have ``forward_ahead`` with the same parameters and results. It is called in place of ``forward`` where
        the role's next update takes all of these rows in its first step, which can then go on from this pass.

        One whose numbers for a row are the same bits whichever rows are computed beside it says so by ``row_exact = True`` on its class;
        its forwards may then be made chunk by chunk."""

    def update(
        self, batch: Batch, loss: Loss, *, epochs: int = 1, minibatch: int | None = None, mean: Means = "tokens", seed: int = 0,
        **settings: Any,
    ) -> dict[str, float]:
        """Minibatches of ``loss`` in an order drawn from ``seed``; metrics are means over the rows seen, ``_max`` maxima."""

    def update_shares(self, batch: Batch, loss: Loss, shares: Sequence[RankShare], mean: Means, settings: Mapping[str, Any]) -> Learned:
        """One rank's part of an update: its rows, and of each optimizer step its share, which may be empty. Every rank takes every
        step; gradients are summed over the ranks of torch's default group."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of the language model, without heads of our own."""

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder."""

    def load(self, folder: Path) -> None:
        """Read weights from a folder that ``save`` wrote."""

    def state(self) -> dict[str, Tensor]:
        """Everything that a bit-equal continuation needs, by name: ``parameters/NAME``, optimizer state, ``steps``. Live tensors."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from what ``state`` gave."""

    def sleep(self, *parts: str) -> None:
        """Free the memory of these parts, or of all that can be elsewhere. Nothing asleep is used before ``wake``.

        What can, each part apart (weights, optimizer, gradient), a class says by ``movable(settings, device)``; without it, nothing counts
        as freed. ``passing`` names parts that are in memory just while they are used. What ``pieces`` has shown stays good: storages are
        emptied and filled again."""

    def wake(self, *parts: str) -> None:
        """Bring them back, bit for bit."""

    # A trainer may also have ``resize_passes(tokens)``: compute at most so many tokens in a pass from now on; gives the number until now.
    # One whose ``weights()`` are the tensors that it trains, and not copies, says so by ``live = True`` on its class.
    # A trainer may also have ``pieces()``: of each tensor of ``weights`` the boxes that this rank holds, in live memory, nothing gathered
    # (``rlflow.training.weight_sync.shards.Pieces`` by Hugging Face name), or None where what is trained is no such tensor (adapters).


class Generator(Protocol):
    """Samples from a model that someone else trains. ``collective`` and ``tensor_parallel`` say of it what they say of a trainer. Where its
    settings have ``rank_order`` (auto, inner, outer) too, it takes ranks that are not adjacent where ``ModelSpec.outer`` says so."""

    def __init__(self, spec: ModelSpec, settings: Any) -> None: ...

    def generate(self, prompts: Batch, sampling: Sampling, seeds: Sequence[int]) -> Batch:
        """tokens, mask, completion, finish, sampled_logprobs, temperature, policy_version over ``prompts.axis.repeat(samples)``;
        ``seeds`` has one number per row, and a row's tokens depend on its prompt and its seed alone: one with a smaller ``max_tokens`` is
        the same row, cut. Raises PlanError, before anything is sampled, where the model has no positions for a prompt and ``max_tokens``.

        A generator may also have ``generate_chunks(prompts, sampling, seeds, chunks)``: the same rows, bit for bit, in an iterator over
        ``chunks`` batches, each as soon as its last row has ended. Their axes are taken from one, ``prompts.axis.repeat(samples)``.
        Which rows a chunk has depends on what is sampled, never on timing; ``rlflow.training.chunks`` says how.

        One that also has ``logprobs(batch)`` scores given tokens with the weights that it samples with, as ``Trainer.forward`` does."""

    def receive(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Take new weights; ``version`` is the number of updates behind them."""

    def sleep(self, *parts: str) -> None:
        """Take parts out of memory, as a trainer's ``sleep`` does: weights and cache."""

    def wake(self, *parts: str) -> None:
        """Bring parts back into memory."""

    # A generator may also have ``share(weights)``: it samples from now on with these tensors themselves, which a trainer of the same
    # process trains, in the dtype that it samples in. ``receive`` is called as before, and finds them in their place. A
    # class that inherits from one with ``share`` and does not define it is taken to have none: its ``receive`` may do something else.
    # A generator may also have ``destinations(tensors)``: where in its memory each of these tensors belongs
    # (``rlflow.training.weight_sync.proof.Destinations``), with ``writing(version)``, a context in which that memory may be written
    # and nothing is sampled, and ``load(weights)``, its own loader.


Metrics = Mapping[str, float]
