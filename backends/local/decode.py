"""The decode loop. It processes the prompts once, then samples one token per row at each step and removes
finished rows.

On a GPU, the host runs ahead of the device and has to wait whenever it reads a result. So the loop reads the
sampled tokens only once per block of steps, and then works out where in the block each row ended. Nothing
else in the loop waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlflow.author.scope import with_value
from rlflow.backends.local.attention import PackedMask, mask_of_packed, without_cudnn
from rlflow.backends.local.branches import Branches, StepMask, branched, mask_of_step, stepping
from rlflow.backends.local.cache import new_cache
from rlflow.backends.local.endings import Endings
from rlflow.backends.local.network import Network
from rlflow.backends.local.passes import alike
from rlflow.backends.local.sampling import draw
from rlflow.backends.local.transformers_internals import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    Cache,
    causal_mask_function,
    sdpa_mask,
)
from rlflow.errors import PlanError
from rlflow.training.protocols import Sampling

_KNOWN = ContextVar("known", default=False)


def known() -> AbstractContextManager[None]:
    """Assume inside a ``with`` block that every padding mask hides at least one token, because checking would
    mean waiting for a GPU."""
    return with_value(_KNOWN, True)


def _sdpa_mask(
    *args: Any,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **options: Any,
) -> Tensor | PackedMask | StepMask | None:
    """Stand in for the mask function of transformers. The behaviour differs only inside ``known`` and for
    packed or branched rows."""
    visible = options.get("mask_function", causal_mask_function)
    if (packed := mask_of_packed(options.get("local_size"), visible, use_vmap)) is not None:
        return packed
    if (step := mask_of_step(options.get("local_size"), visible, use_vmap)) is not None:
        return step
    look = attention_mask is None or not _KNOWN.get()
    return sdpa_mask(
        *args,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and look,
        use_vmap=use_vmap,
        **options,
    )


ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = _sdpa_mask


IDLE = 0.2  # share of finished rows at which the cache is copied without the finished rows
# prompts, and the tokens of three rows in three steps
TRIAL = [[3, 4, 5, 6, 7, 8], [9, 3]], [[4, 2, 6], [9, 3, 4], [5, 5, 7]]
OF = torch.tensor([0, 0, 1])  # the prompt of each row
BLOCK = 16  # tokens of each row between two reads from a GPU


def block_of(device: torch.device) -> int:
    """Return how many steps to take between checks for finished rows. On a CPU it's 1, because reading a
    result costs nothing."""
    return 1 if device.type == "cpu" else BLOCK


@dataclass(frozen=True)
class Drawn:
    """The responses sampled so far. ``lengths`` and ``stopped`` are in host memory."""

    tokens: Tensor  # int64 [rows, max_tokens]; only the first ``lengths`` tokens of each row count
    logprobs: Tensor  # [rows, max_tokens]
    lengths: Tensor  # int64 [rows]
    stopped: Tensor  # bool [rows]: ended by an end token, a stop string, or a prescribed length

    @staticmethod
    def nothing(
        rows: int, max_tokens: int, logprobs: torch.dtype, device: torch.device | str = "cpu"
    ) -> Drawn:
        """Create empty responses with space for ``rows`` rows of up to ``max_tokens`` tokens. ``logprobs`` is
        the dtype of the log-probs."""
        shape = (rows, max_tokens)
        return Drawn(
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=logprobs, device=device),
            torch.full((rows,), max_tokens),
            torch.zeros(rows, dtype=torch.bool),
        )

    def end(self, numbers: Tensor, columns: range, ends: Endings) -> Tensor:
        """Mark the rows that end within the newest ``columns`` (steps), and return their indices. Only the
        rows in ``numbers`` are checked. Nothing but this call reads from the device."""
        going = numbers[~self.stopped[numbers]]
        if ends.lengths is not None:
            at = (ends.lengths[going] - 1 - columns.start).clamp(max=len(columns))
        else:
            newest = self.tokens[:, max(0, columns.start - ends.reach) : columns.stop].cpu()[going]
            at = ends(newest, len(columns), columns.start)
        ended = at < len(columns)
        self.lengths[going[ended]] = columns.start + at[ended] + 1
        self.stopped[going[ended]] = True
        return going[ended]


@dataclass
class Rows:
    """The unfinished rows of the decode loop."""

    numbers: Tensor  # int64 [rows] on the host: the row numbers
    places: Tensor  # the same numbers on the device
    padded: Tensor  # bool [rows] on the host: True if there is padding before the prompt
    prompt: Tensor  # int64 [rows], tokens of each prompt
    hidden: Tensor  # [rows, hidden], the hidden states after the last token that was read
    mask: Tensor | None  # bool [rows, width + max_tokens], False at padding; None without padding
    width: int  # tokens of the longest prompt
    cache: Cache  # keys and values of all tokens that were read
    branches: Branches | None = None  # set if rows share the keys and values of their prompts

    def take(self, index: Tensor) -> Rows:
        """Return the rows with these indices, given in host memory. Before ``go_on``, the same row may be
        taken several times."""
        on_device, padded = sent(index, self.places.device), self.padded[index]
        if self.branches is not None:
            self.branches.take(on_device)
        else:
            for layer in self.cache.layers:
                layer.reorder_cache(on_device)
        mask = self.mask[on_device] if self.mask is not None and bool(padded.any()) else None
        return replace(
            self,
            numbers=self.numbers[index],
            places=self.places[on_device],
            padded=padded,
            prompt=self.prompt[on_device],
            hidden=self.hidden[on_device],
            mask=mask,
        )

    def go_on(self, of: Tensor, branch: bool) -> Rows:
        """Return new rows that continue these rows, which are prompts.

        of: int64 [rows] in host memory, ascending, the index of each new row's prompt. branch: True if the
        model supports rows that share one copy of their prompt (``can_branch``).
        """
        branches = (
            branched(self.cache, of, self.mask[:, : self.width] if self.mask is not None else None)
            if branch
            else None
        )
        if branches is None:
            return self.take(of)
        return replace(
            self,
            numbers=self.numbers[of],
            places=self.places[of],
            padded=torch.zeros(len(of), dtype=torch.bool),
            prompt=self.prompt[of],
            hidden=self.hidden[of],
            mask=None,
            branches=branches,
        )


@torch.inference_mode()
def decode(
    network: Network,
    prompts: Sequence[Tensor],
    of: Tensor,
    uniform: Tensor,
    sampling: Sampling,
    ends: Endings,
    block: int,
    branch: bool = False,
) -> Iterator[tuple[Drawn, Tensor]]:
    """Sample one response for each entry of ``of`` [rows], the index of the row's prompt.

    Each time the loop finds that rows have ended, it yields all responses so far (always the same tensors)
    and the indices of these rows. The indices and ``of`` are in host memory.

    uniform: float64 [rows, max_tokens] in [0, 1), one random number per token. block: steps between checks
    for ended rows. branch: True if rows with the same prompt share its keys and values. An ended row is still
    computed, but not read, until its block ends and a fifth of the rows have ended.
    """
    rows = prefill(network, prompts, sampling.max_tokens).go_on(of, branch)
    rows.numbers, rows.places = torch.arange(len(of)), torch.arange(len(of), device=network.device)
    drawn = Drawn.nothing(
        len(of), sampling.max_tokens, torch.promote_types(rows.hidden.dtype, torch.float32), network.device
    )
    token = rows.places  # token of the previous step; unused in the first step
    for first in range(0, sampling.max_tokens, block):
        columns = range(first, min(first + block, sampling.max_tokens))
        for step in columns:
            if step:
                rows.hidden = advance(network, rows, token, step - 1)
            barred = ends.eos if ends.lengths is not None or step < sampling.min_tokens else None
            token, logprob = draw(network.logits(rows.hidden), uniform[rows.places, step], sampling, barred)
            drawn.tokens[rows.places, step], drawn.logprobs[rows.places, step] = token, logprob
        ended = drawn.end(rows.numbers, columns, ends)
        if not len(ended):
            continue
        yield drawn, ended
        going = (~drawn.stopped[rows.numbers]).nonzero()[:, 0]
        if len(going) == 0:
            return
        if len(going) <= (1 - IDLE) * len(rows.numbers):
            rows, token = rows.take(going), token[sent(going, token.device)]
    yield drawn, (~drawn.stopped).nonzero()[:, 0]


def prefill(network: Network, prompts: Sequence[Tensor], room: int) -> Rows:
    """Run the prompts through the model and return their rows, each with space for ``room`` more tokens.
    Prompts are padded on the left, so they all end at the same position."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    inside = torch.arange(width) >= width - lengths[:, None]
    ids = torch.zeros(inside.shape, dtype=torch.int64)
    ids[inside] = torch.cat(list(prompts))
    positions = (torch.arange(width) - (width - lengths[:, None])).clamp(min=0)
    numbers, padded = torch.arange(len(lengths)), lengths < width
    ids, lengths, inside, positions, places = (
        sent(x, network.device) for x in (ids, lengths, inside, positions, numbers)
    )
    mask = torch.nn.functional.pad(inside, (0, room), value=True) if bool(padded.any()) else None
    cache = new_cache(network.module.config)
    hidden = _hidden(network, ids, positions, cache, inside if mask is not None else None)
    return Rows(numbers, places, padded, lengths, hidden, mask, width, cache)


def advance(network: Network, rows: Rows, token: Tensor, step: int) -> Tensor:
    """Run one decode step and return the hidden states [rows, hidden] after ``token`` [rows], token number
    ``step`` of each response."""
    mask = None if rows.mask is None else rows.mask[:, : rows.width + step + 1]
    with stepping(rows.branches):
        return _hidden(network, token[:, None], (rows.prompt + step)[:, None], rows.cache, mask)


def _hidden(network: Network, ids: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None) -> Tensor:
    """Return the hidden states after the last of the tokens ``ids`` [rows, L].

    mask: bool [rows, all tokens so far] with at least one False, or None without padding.
    """
    attended = {} if mask is None else {"attention_mask": mask}
    with known(), without_cudnn(network.device):
        return network.hidden(ids, positions, cache, **attended)[:, -1]


@torch.inference_mode()
def check_cache(network: Network) -> None:
    """Raise PlanError if the local generator can't use the model's key-value cache.

    A test on a few tokens covers rows of different lengths, removed rows, and rows taken twice. The hidden
    states have to match those without a cache.
    """
    vocabulary = network.module.get_input_embeddings().weight.shape[0]
    prompts, steps = ([torch.tensor(row) % vocabulary for row in rows] for rows in TRIAL)
    try:
        rows = prefill(network, prompts, len(steps)).go_on(OF, branch=False)
        for step, token in enumerate(steps):
            hidden = advance(network, rows, token.to(network.device), step)
            rows = rows.take(torch.arange(len(OF)))
        if alike(network, hidden, _without_cache(network, prompts, steps)):
            return
        found = "hidden states that differ from those without a cache"
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    raise PlanError.of(
        "no-cache",
        f"{type(network.module).__name__} has a key-value cache that the local generator does not support",
        found=found,
        expected="an attention model such as Llama, Qwen or Gemma",
        remedy="--ROLE.generator vllm",
    )


def _without_cache(network: Network, prompts: Sequence[Tensor], steps: Sequence[Tensor]) -> Tensor:
    """Return the hidden states [rows, hidden] after the last step of each row in OF."""
    rows = [torch.cat([prompts[of], tokens]) for of, tokens in zip(OF, torch.stack(steps, 1), strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(network.device)
    positions = torch.arange(ids.shape[1], device=network.device)[None]
    last = torch.tensor([len(row) - 1 for row in rows], device=network.device)
    return network.hidden(ids, positions, use_cache=False)[torch.arange(len(rows)), last]


@torch.inference_mode()
def can_branch(network: Network) -> bool:
    """Return True if the model's results for rows that share one copy of their prompt match those for single
    rows.

    This is tested on a few tokens. The answer is False if the model's layers don't use torch's attention.
    """
    if "position_ids" not in network.takes or network.device.type != "cpu":
        return False
    vocabulary = network.module.get_input_embeddings().weight.shape[0]
    prompts, steps = ([torch.tensor(row) % vocabulary for row in rows] for rows in TRIAL)
    try:
        single, together = (
            prefill(network, prompts, len(steps)).go_on(OF, branch) for branch in (False, True)
        )
        pairs = [
            [advance(network, rows, token, step).double() for rows in (single, together)]
            for step, token in enumerate(steps)
        ]
    # a model that requires a tensor as its mask
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return together.branches is not None and all(alike(network, *pair) for pair in pairs)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from host memory to a device without waiting for the device."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
