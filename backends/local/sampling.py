"""Draw one token per row from its logits, using one uniform random number."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.backends.local.logprobs import rows_at_once
from rlflow.training.protocols import Sampling

ELSEWHERE = 8 << 20  # logits processed at once on devices other than a CPU
# size from which a vocabulary counts as large; number of its tokens that are summed at once
LARGE, BLOCK = 1 << 15, 512


def draw(
    logits: Tensor, uniform: Tensor, sampling: Sampling, barred: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row. Returns the tokens, int64 [rows], and their log-probs, [rows].

    logits: [rows, vocabulary]. uniform: float64 [rows] in [0, 1), the only random number of each row. barred:
    int64 [n], tokens that are never drawn. As with truncation, their probability goes to the other tokens.

    The token is where the cumulative distribution, summed in float64, passes the row's random number.
    Log-probs are those of the sampled distribution, after temperature and truncation. Temperature 0 picks the
    most likely token and returns its log-prob at temperature 1 without truncation.
    """
    pieces = zip(*(each.split(rows_at_once(logits, ELSEWHERE)) for each in (logits, uniform)), strict=True)
    drawn = [
        _draw(some.to(torch.promote_types(some.dtype, torch.float32)), at, sampling, barred)
        for some, at in pieces
    ]
    tokens, logprobs = zip(*drawn, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _draw(
    logits: Tensor, uniform: Tensor, sampling: Sampling, barred: Tensor | None
) -> tuple[Tensor, Tensor]:
    allowed = logits if barred is None else logits.index_fill(-1, barred.to(logits.device), -torch.inf)
    if sampling.temperature == 0:
        token = allowed.argmax(-1, keepdim=True)
        return token[:, 0], logits.log_softmax(-1).gather(-1, token)[:, 0]
    scaled = allowed if sampling.temperature == 1 else allowed / sampling.temperature
    logprobs = truncated(scaled, sampling.top_k, sampling.top_p).log_softmax(-1)
    token = inverse(logprobs, uniform)
    return token, logprobs.gather(-1, token[:, None])[:, 0]


def inverse(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Return int64 [rows]: the token at which each row's cumulative distribution passes its number in
    ``uniform``.

    logprobs: [rows, vocabulary]. The distribution is summed in float64. For a large vocabulary, blocks are
    summed first and the cumulative sum is computed only within one block, because a full cumulative sum is
    slow.
    """
    vocabulary, tokens = logprobs.shape[-1], []
    for some, at in zip(
        *(each.split(rows_at_once(logprobs, ELSEWHERE)) for each in (logprobs, uniform[:, None])), strict=True
    ):
        probability = some.exp().double()
        tokens.append(
            _passes(probability.cumsum(-1), at) if vocabulary < LARGE else _by_blocks(probability, at)
        )
    # NaN gives the last token; its NaN log-prob makes training skip the row
    return torch.cat(tokens)[:, 0].clamp_(max=vocabulary - 1)


def _passes(cumulative: Tensor, at: Tensor) -> Tensor:
    return torch.searchsorted(cumulative, at * cumulative[:, -1:], right=True)


def _by_blocks(probability: Tensor, at: Tensor) -> Tensor:
    """Do the work of ``inverse`` for a large vocabulary, returning int64 [rows, 1]. The token is never past
    the last one in its block that has a probability above 0."""
    blocks = torch.nn.functional.pad(probability, (0, -probability.shape[-1] % BLOCK)).unflatten(
        -1, (-1, BLOCK)
    )
    sums = blocks.sum(-1).cumsum(-1)
    block = _passes(sums, at).clamp(max=sums.shape[-1] - 1)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(-1, block)
    inside = blocks.take_along_dim(block[..., None], 1)[:, 0].cumsum(-1)
    place = torch.searchsorted(inside, at * sums[:, -1:] - before, right=True)
    return block * BLOCK + torch.minimum(place, torch.searchsorted(inside, inside[:, -1:].clone()))


def truncated(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set the logits of all tokens that must not be sampled to -inf.

    First, the ``top_k`` most likely tokens are kept (0: all). Of these, the smallest set whose probability
    reaches ``top_p`` is kept (1: all; nucleus sampling, Holtzman et al. 2020). The most likely token is
    always kept.
    """
    if 0 < top_k < logits.shape[-1]:
        highest = logits.topk(top_k, -1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, highest.indices, highest.values)
    return (
        torch.cat([_nucleus(some, top_p) for some in logits.split(rows_at_once(logits, ELSEWHERE))])
        if top_p < 1
        else logits
    )


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(-1, dtype=torch.float64)
    beyond = probability.cumsum(-1) - probability >= top_p
    beyond[:, 0] = False
    return torch.empty_like(logits).scatter(-1, index, ordered.masked_fill(beyond, -torch.inf))
