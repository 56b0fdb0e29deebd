"""A flow whose stage misbehaves in its third call; hp.fault names the fault. A resumed run skips the fault,
because the file hp.once exists then."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from rlflow import flow, loss, stage

C, HELD = ctypes.CDLL(None), ctypes.PyDLL(None)  # PyDLL keeps the interpreter's lock


@dataclass(frozen=True)
class Settings:
    fault: str = ""
    once: str = ""  # created when the fault has happened
    samples: int = 2


def interrupt():
    raise KeyboardInterrupt


def stays():
    if os.fork() == 0:
        while True:
            time.sleep(1)


def fork_and_exit():
    if os.fork() == 0:
        sys.exit(0)


def daemon():
    """Start two processes in sessions of their own; the parent of one ends at once."""
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    subprocess.run(["sh", "-c", "setsid sleep 600 >&- 2>&- &"], check=True)


def leaves_all():
    daemon()
    stays()


def asked():
    """Wait until the run is asked to stop, then return."""
    while not signal.getsignal(signal.SIGHUP).__self__.asked:
        time.sleep(0.02)


def speak():
    """Print after the terminal has hung up."""
    asked()
    for _ in range(3):
        print("a stage has something to say" * 50, flush=True)
        print("and complains", file=sys.stderr, flush=True)


FAULTS = {
    "hold": lambda: HELD.read(os.pipe()[0], ctypes.create_string_buffer(1), 1),
    "sys.exit": lambda: sys.exit(0),
    "interrupt": interrupt,
    "os._exit": lambda: os._exit(0),
    "C exit": lambda: C._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "fork": os.fork,
    "fork and exit": fork_and_exit,
    "stays": stays,
    "daemon": daemon,
    "leaves all": leaves_all,
    "sleep": lambda: time.sleep(1.0),
    "asked": asked,
    "speak": speak,
}
CALLS = []
SECONDS = "FAULTY_SECONDS"  # an environment variable, see process_faults


@stage(gives="advantages", timeout=float(os.environ.get(SECONDS, "2")), pure=False)  # counts its calls
def judge(scores, mask, *, fault, once):
    CALLS.append(fault)
    if fault and len(CALLS) == 3 and not os.path.exists(once):
        open(once, "w").close()
        FAULTS[fault]()
    return torch.where(mask, scores[:, None], 0.0)


@loss
def simple(new, advantages):
    return -new.logprobs * advantages


@flow
def faulty(prompts, actor, reward, hp=Settings()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=4)
    batch |= reward(batch)
    batch |= judge(batch, fault=hp.fault, once=hp.once)
    actor.update(batch, simple)
