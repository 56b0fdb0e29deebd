"""One token per row from its logits and one uniform number."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.training.protocols import Sampling

AT_ONCE = 8 << 20  # probabilities whose sums, in float64, exist at once


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling, barred: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(token int64 [rows], its log-prob [rows]) from logits [rows, vocabulary] and uniform float64 [rows] in [0, 1).

    Log-probs are those of the distribution that is sampled, after temperature and truncation. Temperature 0 takes the likeliest
    token and gives its log-prob at temperature 1, untruncated. The token is the inverse of the cumulative distribution at
    ``uniform``, summed in float64: one number per row and step, so nothing else has a say in what a row draws. The tokens ``barred``,
    int64 [n], are not drawn: their probability goes to the others, as with truncation.
    """
    allowed = logits if barred is None else logits.index_fill(-1, barred.to(logits.device), -torch.inf)
    if sampling.temperature == 0:
        token = allowed.argmax(-1, keepdim=True)
        return token[:, 0], logits.log_softmax(-1).gather(-1, token)[:, 0]
    logprobs = truncated(allowed / sampling.temperature, sampling.top_k, sampling.top_p).log_softmax(-1)
    token = inverse(logprobs, uniform)
    return token, logprobs.gather(-1, token[:, None])[:, 0]


def inverse(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """int64 [rows]: where the cumulative distribution of each row of ``logprobs`` [rows, vocabulary], summed in float64, passes
    ``uniform``."""
    vocabulary, tokens = logprobs.shape[-1], []
    for some, at in zip(*(each.split(_rows(logprobs)) for each in (logprobs, uniform[:, None])), strict=True):
        cumulative = some.exp().cumsum(-1, dtype=torch.float64)
        tokens.append(torch.searchsorted(cumulative, at * cumulative[:, -1:], right=True))
    return torch.cat(tokens)[:, 0].clamp_(max=vocabulary - 1)  # NaN ends here, and a NaN log-prob leaves the row out of training


def truncated(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits with -inf outside the ``top_k`` likeliest (0: off), then outside the smallest set of the rest whose probability
    reaches ``top_p`` (1: off; nucleus sampling, Holtzman et al. 2020). The likeliest always stays."""
    if 0 < top_k < logits.shape[-1]:
        highest = logits.topk(top_k, -1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, highest.indices, highest.values)
    return torch.cat([_nucleus(some, top_p) for some in logits.split(_rows(logits))]) if top_p < 1 else logits


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(-1, dtype=torch.float64)
    beyond = probability.cumsum(-1) - probability >= top_p
    beyond[:, 0] = False
    return torch.empty_like(logits).scatter(-1, index, ordered.masked_fill(beyond, -torch.inf))


def _rows(logits: Tensor) -> int:
    """How many rows of the vocabulary are worked on at once."""
    return max(1, AT_ONCE // logits.shape[-1])
