"""Trust-Region DPO, TR-DPO (Gorbatovski et al. 2024, "Learn Your Reference Model for Real Good Alignment").

DPO whose reference moves towards the policy, so that the policy may go further without overoptimization. The
paper's soft update has `alpha` below 1, and its hard update is `alpha=1`, with a larger `tau`. The paper counts
optimizer steps between two updates; here, `tau` counts iterations, which are one step each by default.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le
from torch.nn.functional import logsigmoid

from rlflow import flow, follow, loss, row, row_sum


@dataclass(frozen=True)
class TRDPO:
    alpha: Annotated[float, Gt(0), Le(1)] = 0.6  # how far the reference moves towards the policy; 1: copy it
    tau: Annotated[int, Ge(1)] = 64  # iterations from one move of the reference to the next
    beta: Annotated[float, Gt(0)] = 0.05  # how strongly the loss keeps the policy near the reference
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 64  # rows per optimizer step, over all ranks; a pair is two


@loss(rows="group")
def prefer(new, ref_logprobs, mask, *, beta):
    margin = row_sum(new.logprobs - ref_logprobs, mask)
    gap = margin[::2] - margin[1::2]  # chosen first
    return -logsigmoid(beta * gap).repeat_interleave(2), {"accuracy": (gap > 0).float(), "gap": gap}


@flow(
    data={"chosen": row(bool)},
    keeps=lambda hp: {"reference": follow("actor", every=hp.tau, after=hp.tau - 1, mix=hp.alpha)},
)
def tr_dpo(pairs, actor, reference, hp=TRDPO()):
    pairs |= reference.logprobs(pairs, gives="ref_logprobs")
    actor.update(pairs, prefer, beta=hp.beta, mean="rows", epochs=hp.epochs, minibatch=hp.minibatch)
