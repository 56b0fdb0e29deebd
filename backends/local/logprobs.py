"""Compute log-probs and entropy from hidden states, with logits for only a few tokens at a time.

A batch's logits are by far its largest tensor (16k tokens × 150k words × 4 bytes = 9.8 GB). Here, logits
exist for at most ``tokens`` tokens at once. Those of the first piece are kept for the backward pass, in the
head's dtype; those of the other pieces are recomputed. No other tensor is as large, except the gradient of
the logits if it can't overwrite them. Softmax and its gradient process a few rows at a time, which stay in
the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ENTRIES = 2**28  # default number of logits at once: 1 GiB in float32
CACHED = 2**19  # logits processed at once on a CPU, to stay in its cache
ELSEWHERE = 2**25  # logits processed at once on other devices
Logits = Callable[[Tensor], Tensor]


def tokens_at_once(setting: int, vocabulary: int) -> int:
    """Return how many tokens may have logits at the same time: ``setting``, or, if it is 0, as many as share
    2**28 logits."""
    return setting or max(1, ENTRIES // vocabulary)


def logprobs_and_entropy(
    logits: Logits,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    *,
    tokens: int,
    entropy: bool,
    once: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob of each target, [entries], and, on request, the entropy in nats, [entries].

    The distribution is softmax(logits(hidden) / temperature). From the logits on, everything is computed in
    float32 or better.

    logits: maps hidden states to logits, in any dtype. hidden: [entries, hidden size]. targets: int64
    [entries]. temperature: [entries], or None if all are 1. tokens: how many entries may have logits at once.
    once: True if nothing else reads the logits. The backward pass then overwrites them with their gradient,
    and torch refuses a second backward pass.
    """
    pieces: list[tuple[Tensor, Tensor | None]] = []
    parts = hidden.split(tokens)
    temperatures = [None] * len(parts) if temperature is None else temperature.split(tokens)
    for piece in zip(parts, targets.split(tokens), temperatures, strict=True):
        if torch.is_grad_enabled() and pieces:
            pieces.append(
                checkpoint(
                    _piece, logits, *piece, entropy, once, use_reentrant=False, preserve_rng_state=False
                )
            )
        else:
            pieces.append(_piece(logits, *piece, entropy, once))
    if not entropy:
        return torch.cat([logprob for logprob, _ in pieces]), None
    return torch.cat([logprob for logprob, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def _piece(
    logits: Logits, hidden: Tensor, targets: Tensor, temperature: Tensor | None, entropy: bool, once: bool
) -> tuple[Tensor, Tensor | None]:
    logprobs, entropies = _LogProbs.apply(logits(hidden), targets, temperature, entropy, once)
    return logprobs, entropies if entropy else None


class _LogProbs(torch.autograd.Function):
    """Log-probs and entropies [entries] of logits [entries, vocabulary], which aren't copied."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor | None, entropy: bool, once: bool
    ) -> tuple[Tensor, Tensor]:
        totals = logits.new_empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
        logprobs, entropies = torch.empty_like(totals), torch.zeros_like(totals)
        for rows in _some(logits):
            scaled = _scaled(logits, temperature, rows)
            totals[rows] = total = scaled.logsumexp(-1)
            logprobs[rows] = scaled.gather(-1, targets[rows, None])[:, 0] - total
            if entropy:
                entropies[rows] = total - ((scaled - total[:, None]).exp_() * scaled).sum(-1)
        ctx.save_for_backward(logits, targets, temperature, totals, entropies)
        ctx.entropy, ctx.once = entropy, once
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, of_logprob: Tensor, of_entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, temperature, totals, entropies = ctx.saved_tensors
        gradient = logits if ctx.once else torch.empty_like(logits)
        for rows in _some(logits):
            scaled, total = _scaled(logits, temperature, rows), totals[rows, None]
            if ctx.entropy:
                weight = of_logprob[rows, None] + of_entropy[rows, None] * (
                    scaled - total + entropies[rows, None]
                )
                new = (scaled - total).exp_().mul_(weight).neg_()
            else:
                new = (scaled - total).exp_().mul_(-of_logprob[rows, None])
            new.scatter_add_(-1, targets[rows, None], of_logprob[rows, None])
            gradient[rows] = new if temperature is None else new.div_(temperature[rows, None])
        return gradient, None, None, None, None


def _some(logits: Tensor) -> Iterator[slice]:
    """Split the rows of the logits into slices that each fit into a cache."""
    count = rows_at_once(logits, ELSEWHERE)
    return (slice(first, first + count) for first in range(0, len(logits), count))


def rows_at_once(logits: Tensor, elsewhere: int) -> int:
    """Return how many rows of logits [rows, vocabulary] to process at once: as many as fit into a CPU's cache
    or, on other devices, as many as have ``elsewhere`` logits."""
    return max(1, (CACHED if logits.device.type == "cpu" else elsewhere) // logits.shape[-1])


def _scaled(logits: Tensor, temperature: Tensor | None, rows: slice) -> Tensor:
    """Return logits / temperature for these rows, in float32 or better. This is a view if nothing changes."""
    some = logits[rows].to(torch.promote_types(logits.dtype, torch.float32))
    return some if temperature is None else some / temperature[rows, None]
