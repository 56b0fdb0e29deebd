"""Direct Preference Optimization, DPO (Rafailov et al. 2023), and with `form="ipo"` Identity Preference
Optimization (Azar et al. 2024).

DPO trains offline on pairs of a chosen and a rejected response. In both forms, a response's margin is the sum
of its tokens' log-ratios to the reference. (TRL divides IPO's margin by the response's length.)
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from torch.nn.functional import logsigmoid

from rlflow import flow, loss, row, row_sum


@dataclass(frozen=True)
class DPO:
    beta: Annotated[float, Gt(0)] = 0.1  # how strongly the loss keeps the policy near the reference
    # logistic loss of the gap ("sigmoid"), or squared distance of the gap from 1 / (2 beta) ("ipo")
    form: Literal["sigmoid", "ipo"] = "sigmoid"
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 64  # rows per optimizer step, over all ranks; a pair is two


@loss(rows="group")
def prefer(new, ref_logprobs, mask, *, beta, form):
    margin = row_sum(new.logprobs - ref_logprobs, mask)
    gap = margin[::2] - margin[1::2]  # chosen first
    value = -logsigmoid(beta * gap) if form == "sigmoid" else (gap - 1 / (2 * beta)).square()
    return value.repeat_interleave(2), {"accuracy": (gap > 0).float(), "gap": gap}


@flow(data={"chosen": row(bool)})
def dpo(pairs, actor, reference, hp=DPO()):
    pairs |= reference.logprobs(pairs, gives="ref_logprobs")
    actor.update(
        pairs, prefer, beta=hp.beta, form=hp.form, mean="rows", epochs=hp.epochs, minibatch=hp.minibatch
    )
