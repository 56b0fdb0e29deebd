"""How much of what an update reads moves it: the tokens whose log-prob has a gradient, and those whose gradient the clipping of a ratio
takes away.

Counted where every trainer's update passes, on the way back through the loss, from the gradient with respect to what the model computed.
Numbers are only looked at: the gradient stays as it is, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlflow.training.metrics import Meter, Totals
from rlflow.training.objective import New

TOKENS = "funnel/tokens"


def watch(new: New, mask: Tensor, columns: Mapping[str, Tensor], meter: Meter) -> None:
    """Have tokens counted when the gradient of a micro-batch has come back to ``new``, before the loss is a function of it.

    mask: bool [rows, T]; columns: what the loss reads, float [rows, T], of which ``logprobs`` says on which side of 1 a ratio is and
    ``advantages`` which tokens have anything to learn from."""
    computed = new.logprobs if new.logprobs is not None else new.values
    if computed is None or not computed.requires_grad:
        return
    old = columns.get("logprobs") if new.logprobs is not None else None
    values = computed.detach()  # a hook that named the tensor itself would keep its graph, and the weights, for as long as the process

    def count(gradient: Tensor) -> None:
        meter.observe(_of_tokens(gradient, values, old, columns.get("advantages")), mask)

    computed.register_hook(count)  # type: ignore[no-untyped-call]


def _of_tokens(gradient: Tensor, new: Tensor, old: Tensor | None, advantages: Tensor | None) -> dict[str, Tensor]:
    """Name → value of each token [rows, T], whose sums over all tokens of an update are what ``token_funnel`` is made of."""
    size = gradient.abs().double()
    values = {"with_gradient": gradient != 0, "size": size, "square": size**2}
    if old is None:
        return values
    values["moved"] = (new - old).abs()
    if advantages is not None:
        stopped = (gradient == 0) & (advantages != 0)
        values |= {"clipped_above": stopped & (new > old), "clipped_below": stopped & (new < old)}
    return values


def token_funnel(totals: Mapping[str, Totals]) -> dict[str, float]:
    """The metrics from the totals of all ranks, over all optimizer steps of an update: each token counts once in every epoch.

    funnel/tokens                   tokens under the mask
    funnel/tokens_with_gradient     of them those with ∂loss/∂log-prob ≠ 0; of a value loss, ∂loss/∂value
    funnel/tokens_effective         (Σ|g|)² / Σg², as many tokens as gradients of one size would be
    funnel/tokens_clipped_above     tokens with an advantage but no gradient, whose ratio to ``logprobs`` is above 1; below: under 1
    funnel/moved                    mean |new log-prob - logprobs| of a token, nats: 0 in an update of one step, which the executor measures
    """
    if "with_gradient" not in totals:
        return {}
    (size, tokens, *_), square = totals["size"], totals["square"][0]
    metrics = {TOKENS: totals["with_gradient"][1], f"{TOKENS}_with_gradient": totals["with_gradient"][0],
               f"{TOKENS}_effective": size * size / square if square > 0 else 0.0}  # fmt: skip
    metrics |= {f"{TOKENS}_{name}": totals[name][0] for name in ("clipped_above", "clipped_below") if name in totals}
    return metrics | ({"funnel/moved": totals["moved"][0] / tokens} if "moved" in totals and tokens else {})
