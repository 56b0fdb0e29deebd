"""A flow whose workers die: fault.json beside this file says in which calls of a place, counted over all
ranks from 1, and of which signal.

Places are what a worker is asked for ("forward of critic", and "forward of critic, 2" in iteration 2 alone),
and what is within: "update", a call of the loss, and "generate", a batch of samples, of an iteration too; and
"reward", that of a row.
"""

import json
import os
import signal
import threading
from pathlib import Path

import ray
import torch

from rlflow import flow, loss, stage

HERE = Path(__file__).parent
NOW = threading.local()  # iteration: of what this thread does for the driver


def in_worker():
    """Whether this is a worker: a global that says so would make the flow another one there."""
    return bool(ray.is_initialized() and ray.get_runtime_context().get_actor_id())


def happen(place, pid=None):
    """Count a call of a place, and send the worker a signal at those that the file names."""
    file = os.open(HERE / f"{place}.calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b".")
    number = os.lseek(file, 0, os.SEEK_CUR)  # of several ranks each has its own
    os.close(file)
    fault = json.loads((HERE / "fault.json").read_text())
    if number in fault.get(place, ()):
        os.kill(pid or os.getpid(), fault.get("signal", signal.SIGKILL))


def happen_now(place):
    happen(place)
    happen(f"{place}, {getattr(NOW, 'iteration', None)}")  # in a run without workers nobody says it


def counted(real, place=None):
    """The function, which counts its calls; one of a worker's operations where no place is given."""

    def counting(*args, **kwargs):
        if place is None:
            NOW.iteration = args[1].iteration
        happen_now(place or str(args[1]).partition(" in iteration")[0])
        return real(*args, **kwargs)

    return counting


if in_worker():
    from rlflow.backends.local.generator import Generator
    from rlflow.cluster.worker import OPERATIONS

    Generator.generate = counted(Generator.generate, "generate")
    OPERATIONS |= {name: counted(real) for name, real in OPERATIONS.items()}


def length(completion):
    """A reward, which runs in a process of the worker's."""
    happen("reward", os.getppid())
    return float(len(completion))


@stage(gives="advantages")
def judge(scores, logprobs, ref_logprobs, values, mask):
    return torch.where(mask, scores[:, None] - values - 0.1 * (logprobs - ref_logprobs), 0.0)


@loss
def policy_loss(new, logprobs, sampled_logprobs, advantages):
    if in_worker():  # `check` calls a loss on made rows, in the driver
        happen_now("update")
    return -(new.logprobs - sampled_logprobs).exp() * advantages


@loss(new="values")
def value_loss(new, scores):
    return (new.values - scores[:, None]).square()


@flow
def dying(prompts, actor, critic, reference, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= reference.logprobs(batch, gives="ref_logprobs")
    batch |= critic.values(batch)
    batch |= judge(batch)
    critic.update(batch, value_loss, minibatch=8)
    actor.update(batch, policy_loss, minibatch=8)
