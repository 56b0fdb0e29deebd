"""A flow whose workers die. fault.json next to this file names the calls of a place, counted over all ranks
from 1, and the signal to send.

A place is a request to a worker ("forward of critic", or "forward of critic, 2" in iteration 2 only), or a
step within one: "update", a call of the loss, "generate", a batch of samples (both also per iteration), and
"reward", the reward of a row.
"""

import json
import os
import signal
import threading
from pathlib import Path

import ray
import torch

from rlflow import flow, loss, row, stage, table

HERE = Path(__file__).parent
NOW = threading.local()  # iteration: the iteration that this thread works on for the driver


def in_worker():
    """Return True in a worker. A global instead of this function would make the worker's flow a different
    one."""
    return bool(ray.is_initialized() and ray.get_runtime_context().get_actor_id())


def happen(place, pid=None):
    """Count a call of a place, and send the worker a signal at the calls that the file names."""
    file = os.open(HERE / f"{place}.calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b".")
    number = os.lseek(file, 0, os.SEEK_CUR)  # one file per rank
    os.close(file)
    fault = json.loads((HERE / "fault.json").read_text())
    if number in fault.get(place, ()):
        os.kill(pid or os.getpid(), fault.get("signal", signal.SIGKILL))


def happen_now(place):
    happen(place)
    happen(f"{place}, {getattr(NOW, 'iteration', None)}")  # a run without workers has no iteration here


def counted(real, place=None):
    """Return the function with its calls counted; without a place, one of a worker's operations."""

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
    """A reward, which runs in a reward process of the worker."""
    happen("reward", os.getppid())
    return float(len(completion))


@stage(gives="advantages")
def judge(scores, logprobs, ref_logprobs, values, mask):
    return torch.where(mask, scores[:, None] - values - 0.1 * (logprobs - ref_logprobs), 0.0)


@stage(gives={"worth": row(torch.float32)})
def worth(scores):
    return 1 + scores


@loss
def policy_loss(new, logprobs, sampled_logprobs, advantages):
    if in_worker():  # in the driver, `check` calls a loss on synthetic rows
        happen_now("update")
    return -(new.logprobs - sampled_logprobs).exp() * advantages


@loss(new="values")
def value_loss(new, scores):
    return (new.values - scores[:, None]).square()


@flow(keeps=lambda hp: {"seen": table(worth=1.0)})
def dying(prompts, actor, critic, reference, reward, seen):
    prompts |= seen.read(prompts, stale_ok="draws may be a little old")
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    seen.write(batch.drop("worth") | worth(batch), worth="add")
    batch |= actor.logprobs(batch)
    batch |= reference.logprobs(batch, gives="ref_logprobs")
    batch |= critic.values(batch)
    batch |= judge(batch)
    critic.update(batch, value_loss, minibatch=8)
    actor.update(batch, policy_loss, minibatch=8)
