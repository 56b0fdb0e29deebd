"""A flow with a fault on one rank: the process dies, is suspended, spins in Python, keeps the lock, is left,
or forks."""

import ctypes
import os
import signal
import subprocess
import threading
from dataclasses import dataclass

import ray
import torch

from rlflow import flow, loss, stage


@dataclass(frozen=True)
class Settings:
    fault: str = ""  # the fault
    place: str = ""  # its place: judge, policy_loss
    call: int = 0  # the number of the call at that place, counted over all ranks from 1
    count: str = ""  # a file that grows by a byte with each call


def in_worker():
    """Return True in a worker. A global instead of this function would make the worker's flow a different
    one."""
    return bool(ray.is_initialized() and ray.get_runtime_context().get_actor_id())


def stop():
    """Suspend this process. The signal may reach another thread first; meanwhile this thread must not end its
    call."""
    os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()


def spin():
    while True:
        pass


FAULTS = {
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": stop,
    # keeps the lock despite signals
    "hold": lambda: ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1),
    "spin": spin,
    # the child returns too
    "fork and daemon": lambda: (subprocess.Popen(["sleep", "612345"], start_new_session=True), os.fork()),
}


def happen(here, fault, place, call, count):
    if here != place or not fault or not in_worker():  # in the driver, `check` calls a loss on synthetic rows
        return
    file = os.open(count, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b".")
    number = os.lseek(file, 0, os.SEEK_CUR)  # one file per rank
    os.close(file)
    if number == call:
        FAULTS[fault]()


@stage(gives="advantages", timeout=15)
def judge(scores, mask, *, fault, place, call, count):
    happen("judge", fault, place, call, count)
    return torch.where(mask, scores[:, None], 0.0)


@loss
def policy_loss(new, advantages, *, fault, place, call, count):
    happen("policy_loss", fault, place, call, count)
    return -new.logprobs * advantages


@flow
def hanging(prompts, actor, reward, hp=Settings()):
    settings = {"fault": hp.fault, "place": hp.place, "call": hp.call, "count": hp.count}
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= judge(batch, **settings)
    actor.update(batch, policy_loss, minibatch=8, **settings)
