"""One token per row from its logits and one uniform number."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.training.protocols import Sampling


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(token int64 [rows], its log-prob [rows]) from logits [rows, vocabulary] and uniform float64 [rows] in [0, 1).

    Log-probs are those of the distribution that is sampled, after temperature and truncation. Temperature 0 takes the likeliest
    token and gives its log-prob at temperature 1, untruncated. The token is the inverse of the cumulative distribution at
    ``uniform``, summed in float64: one number per row and step, so nothing else has a say in what a row draws.
    """
    if sampling.temperature == 0:
        token = logits.argmax(-1, keepdim=True)
        return token[:, 0], logits.log_softmax(-1).gather(-1, token)[:, 0]
    logprobs = truncated(logits / sampling.temperature, sampling.top_k, sampling.top_p).log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    token.clamp_(max=logits.shape[-1] - 1)  # NaN logits end here, and their NaN log-prob leaves the row out of training
    return token[:, 0], logprobs.gather(-1, token)[:, 0]


def truncated(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits with -inf outside the ``top_k`` likeliest (0: off), then outside the smallest set of the rest whose probability
    reaches ``top_p`` (1: off; nucleus sampling, Holtzman et al. 2020). The likeliest always stays."""
    if 0 < top_k < logits.shape[-1]:
        kept = logits.topk(top_k, -1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
    if top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        probability = ordered.softmax(-1, dtype=torch.float64)
        beyond = probability.cumsum(-1) - probability >= top_p
        beyond[:, 0] = False
        logits = torch.empty_like(logits).scatter(-1, index, ordered.masked_fill(beyond, -torch.inf))
    return logits
