"""Supervised fine-tuning, SFT: maximum likelihood of the completions in the data, averaged over tokens."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from rlflow import flow, loss, text


@dataclass(frozen=True)
class SFT:
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 64  # rows per optimizer step, over all ranks


@loss
def likelihood(new):
    return -new.logprobs, {"probability": new.logprobs.exp()}


@flow(data={"completion": text})
def sft(examples, actor, hp=SFT()):
    actor.update(examples, likelihood, epochs=hp.epochs, minibatch=hp.minibatch)
