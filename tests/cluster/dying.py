"""A flow whose workers die: fault.json beside this file says in which calls of a place, counted over all ranks from 1, and of which signal.
"""

import json
import os
import signal
from pathlib import Path

import ray
import torch

from rlflow import flow, loss, stage

HERE = Path(__file__).parent


def happen(place, pid=None):
    """Count a call of a place, and send the worker a signal at those that the file names."""
    file = os.open(HERE / f"{place}.calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b".")
    number = os.lseek(file, 0, os.SEEK_CUR)  # of several ranks each has its own
    os.close(file)
    fault = json.loads((HERE / "fault.json").read_text())
    if number in fault.get(place, ()):
        os.kill(pid or os.getpid(), fault.get("signal", signal.SIGKILL))


def counted(kind, name, place):
    real = getattr(kind, name)

    def counting(*args, **kwargs):
        happen(place)
        return real(*args, **kwargs)

    setattr(kind, name, counting)


if ray.is_initialized() and ray.get_runtime_context().get_actor_id():  # in a worker
    from rlflow.backends.local.generator import Generator
    from rlflow.backends.local.trainer import Trainer

    counted(Generator, "generate", "generate")
    counted(Trainer, "forward", "forward")


def length(completion):
    """A reward, which runs in a process of the worker's."""
    happen("reward", os.getppid())
    return float(len(completion))


@stage(gives="advantages")
def judge(scores, logprobs, mask):
    happen("stage")
    return torch.where(mask, scores[:, None], 0.0)


@loss
def policy_loss(new, logprobs, sampled_logprobs, advantages):
    happen("update")
    return -(new.logprobs - sampled_logprobs).exp() * advantages


@flow
def dying(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= judge(batch)
    actor.update(batch, policy_loss, minibatch=8)
