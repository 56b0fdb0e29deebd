"""A reward model trained on pairs (Bradley and Terry 1952; Ouyang et al. 2022): the chosen response should
score higher.

`centre` is the weight of a second loss term, the squared sum of a pair's scores. This term keeps scores near
0 (Eisenstein et al. 2023). Difference from Ouyang et al.: there are two responses per prompt.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from torch.nn.functional import logsigmoid

from rlflow import flow, loss, row


@dataclass(frozen=True)
class RewardModel:
    centre: Annotated[float, Ge(0)] = 0.01  # weight of the squared sum of a pair's scores
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 64  # rows per optimizer step, over all ranks; a pair is two


@loss(new="scores", rows="group")
def prefer(new, *, centre):
    chosen, rejected = new.scores[::2], new.scores[1::2]
    value = -logsigmoid(chosen - rejected) + centre * (chosen + rejected).square()
    return value.repeat_interleave(2), {"accuracy": (chosen > rejected).float(), "gap": chosen - rejected}


@flow(data={"chosen": row(bool)})
def reward_model(pairs, reward, hp=RewardModel()):
    reward.update(pairs, prefer, centre=hp.centre, mean="rows", epochs=hp.epochs, minibatch=hp.minibatch)
