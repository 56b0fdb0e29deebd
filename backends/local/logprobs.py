"""Log-probs and entropy from hidden states, a few tokens' logits at a time.

The logits of a batch are its largest tensor by far (16k tokens × 150k words × 4 bytes = 9.8 GB). Here they exist for
``tokens`` entries only, in the backward pass too, where each piece is computed again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ENTRIES = 2**27  # logits at once when a setting leaves it to us: 512 MiB in float32
Logits = Callable[[Tensor], Tensor]


def tokens_at_once(setting: int, vocabulary: int) -> int:
    """``setting``, or for 0 as many tokens as fit in 512 MiB of float32 logits."""
    return setting or max(1, ENTRIES // vocabulary)


def logprobs_and_entropy(
    logits: Logits, hidden: Tensor, targets: Tensor, temperature: Tensor, *, tokens: int, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target [entries] under softmax(logits(hidden) / temperature), and the entropy in nats where asked for.

    hidden: [entries, hidden size]; targets: int64 [entries]; temperature: [entries]. ``logits`` maps hidden states to logits
    in float32 or better.
    """
    pieces = []
    for piece in zip(hidden.split(tokens), targets.split(tokens), temperature.split(tokens), strict=True):
        if torch.is_grad_enabled() and len(hidden) > tokens:
            pieces.append(checkpoint(_piece, logits, *piece, entropy, use_reentrant=False, preserve_rng_state=False))
        else:
            pieces.append(_piece(logits, *piece, entropy))
    if not entropy:
        return torch.cat([logprob for logprob, _ in pieces]), None
    return torch.cat([logprob for logprob, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def _piece(logits: Logits, hidden: Tensor, targets: Tensor, temperature: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    scaled = logits(hidden) / temperature[:, None]
    total = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, targets[:, None])[:, 0] - total
    if not entropy:
        return logprobs, None
    return logprobs, total - ((scaled - total[:, None]).exp() * scaled).sum(-1)
