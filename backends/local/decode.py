"""The decode loop: prompts are read once, then one token per row and step; rows that ended leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from rlflow.backends.local.cache import new_cache
from rlflow.backends.local.endings import Endings
from rlflow.backends.local.network import Network
from rlflow.backends.local.sampling import draw
from rlflow.training.protocols import Sampling

IDLE = 0.2  # share of rows that may have ended before the cache is copied without them


@dataclass(frozen=True)
class Drawn:
    """tokens int64 and logprobs [rows, max_tokens], of which the first ``lengths`` [rows] count; stopped: bool [rows]."""

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    stopped: Tensor


@dataclass
class Rows:
    """The rows under way.

    numbers: int64 [rows], which rows they are. prompt: int64 [rows], tokens of each prompt. hidden: [rows, hidden] after the last
    token read. mask: bool [rows, width + max_tokens], what is no padding, None where nothing is padded. width: tokens of the
    longest prompt.
    """

    numbers: Tensor
    prompt: Tensor
    hidden: Tensor
    mask: Tensor | None
    width: int
    cache: Cache

    def take(self, index: Tensor) -> Rows:
        """The rows at ``index``; a row may be taken several times."""
        for layer in self.cache.layers:
            layer.reorder_cache(index)
        mask = self.mask[index] if self.mask is not None else None
        return replace(self, numbers=self.numbers[index], prompt=self.prompt[index], hidden=self.hidden[index], mask=mask)


@torch.inference_mode()
def decode(
    network: Network, prompts: Sequence[Tensor], of: Tensor, uniform: Tensor, sampling: Sampling, ends: Endings
) -> Iterator[tuple[Drawn, Tensor]]:
    """Sample one response for each entry of ``of`` [rows], the number of its prompt. Gives what is drawn so far, always the same tensors,
    each time that rows end, and their numbers.

    uniform: float64 [rows, max_tokens] in [0, 1). Rows that ended go on, unread, until a fifth of those under way has.
    """
    rows = prefill(network, prompts, sampling.max_tokens).take(of)
    rows.numbers = torch.arange(len(of), device=of.device)
    shape = (len(of), sampling.max_tokens)
    tokens = torch.zeros(shape, dtype=torch.int64, device=of.device)
    logprobs = torch.zeros(shape, dtype=torch.promote_types(rows.hidden.dtype, torch.float32), device=of.device)
    lengths = torch.full((len(of),), sampling.max_tokens, device=of.device)
    stopped = torch.zeros(len(of), dtype=torch.bool, device=of.device)
    drawn = Drawn(tokens, logprobs, lengths, stopped)
    for step in range(sampling.max_tokens):
        token, logprob = draw(network.logits(rows.hidden), uniform[rows.numbers, step], sampling)
        tokens[rows.numbers, step], logprobs[rows.numbers, step] = token, logprob
        done = ends(tokens, rows.numbers, step) & ~stopped[rows.numbers]
        if bool(done.any()):
            lengths[rows.numbers[done]] = step + 1
            stopped[rows.numbers[done]] = True
            yield drawn, rows.numbers[done]
            going = (~stopped[rows.numbers]).nonzero()[:, 0]
            if len(going) == 0:
                return
            if len(going) <= (1 - IDLE) * len(rows.numbers):
                rows, token = rows.take(going), token[going]
        if step + 1 < sampling.max_tokens:
            rows.hidden = advance(network, rows, token, step)
    yield drawn, (~stopped).nonzero()[:, 0]


def prefill(network: Network, prompts: Sequence[Tensor], room: int) -> Rows:
    """Read prompts of any lengths, padded on the left so that all end at the same place, with ``room`` for what follows."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    inside = torch.arange(width) >= width - lengths[:, None]
    ids = torch.zeros(inside.shape, dtype=torch.int64)
    ids[inside] = torch.cat(list(prompts))
    positions = (torch.arange(width) - (width - lengths[:, None])).clamp(min=0)
    ids, lengths, inside, positions = (x.to(network.device) for x in (ids, lengths, inside, positions))
    mask = None if bool(inside.all()) else torch.nn.functional.pad(inside, (0, room), value=True)
    cache = new_cache(network.module.config)
    attended = {} if mask is None else {"attention_mask": inside}
    hidden = network.hidden(ids, positions, past_key_values=cache, use_cache=True, **attended)[:, -1]
    return Rows(torch.arange(len(lengths), device=network.device), lengths, hidden, mask, width, cache)


def advance(network: Network, rows: Rows, token: Tensor, step: int) -> Tensor:
    """Hidden states [rows, hidden] after ``token`` [rows], the ``step``-th of each response."""
    attended = {} if rows.mask is None else {"attention_mask": rows.mask[:, : rows.width + step + 1]}
    positions = (rows.prompt + step)[:, None]
    return network.hidden(token[:, None], positions, past_key_values=rows.cache, use_cache=True, **attended)[:, -1]
