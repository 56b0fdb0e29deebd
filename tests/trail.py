"""A small flow, and a profile hook that writes down which files its ``actor.logprobs`` passes: in the process that runs it, or in a worker,
where the hook begins because the worker loads this file. Nothing is written down unless the environment names a folder for it."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

import rlflow

ROOT = f"{Path(__file__).parents[1]}/"
FOLDER = "RLFLOW_TEST_TRAIL"  # in the environment: where workers write too
NODE = "actor.logprobs"
STARTS = {("rlflow/execution/executor.py", "job"), ("rlflow/cluster/rpc/actor.py", "_run")}


@dataclass(frozen=True)
class Settings:
    """Few and short rows."""

    samples: int = 2
    max_tokens: int = 4


@rlflow.stage(gives="advantages")
def evenly(logprobs):
    return torch.ones_like(logprobs)


@rlflow.loss
def objective(new, logprobs, advantages):
    return (logprobs - new.logprobs) * advantages


@rlflow.flow
def small(prompts, actor, hp=Settings()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= actor.logprobs(batch)
    batch |= evenly(batch)
    actor.update(batch, objective)


class Recorder:
    """A profile hook. Writes JSON lists of files, in the order in which their functions are first called: ``outside``, the calls that are
    open in the main thread while the node's job runs, outermost first; ``inside``, those of the job; ``worker-PID``, those of a forward
    in a worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.thread = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        place = own_file(frame)
        if not place or event not in ("call", "return"):
            return
        called = (place, frame.f_code.co_name)
        if event == "return":
            if getattr(self.thread, "top", None) is frame:
                self._ended(frame)
        elif getattr(self.thread, "top", None) is not None:
            self.thread.inside.setdefault(called)
        elif called in STARTS:
            self.thread.top, self.thread.inside = frame, {called: None}

    def _ended(self, frame: FrameType) -> None:
        """Keep the job of this node alone; in a worker, a forward."""
        called, self.thread.top = self.thread.inside, None
        files = list(dict.fromkeys(place for place, _ in called))
        if getattr(frame.f_locals.get("node"), "name", "") == NODE:
            self._write("inside", files)
            self._write("outside", open_calls())
        elif ("rlflow/cluster/worker.py", "forward") in called:
            self._write(f"worker-{os.getpid()}", files)

    def _write(self, name: str, files: list[str]) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(files))


def own_file(frame: FrameType) -> str:
    """The path within the repository of what the frame runs; empty for other code. While Python ends, even names are gone."""
    path = frame.f_code.co_filename
    return path[len(ROOT):] if ROOT and path.startswith((f"{ROOT}rlflow/", f"{ROOT}backends/")) else ""


def open_calls() -> list[str]:
    """Of the main thread, outermost first, down to the executor, which waits for the node."""
    frame, files = sys._current_frames()[threading.main_thread().ident or 0], list[str]()
    while frame is not None:
        files.append(own_file(frame))
        frame = frame.f_back
    found = list(dict.fromkeys(file for file in reversed(files) if file))
    return found[: found.index("rlflow/execution/executor.py") + 1]


def begin(folder: Path) -> None:
    """In all threads that are started from now on, and in this one where it is the one that works with a worker's models."""
    recorder = Recorder(folder)
    threading.setprofile(recorder)
    if threading.current_thread() is not threading.main_thread():
        sys.setprofile(recorder)


if FOLDER in os.environ:
    begin(Path(os.environ[FOLDER]))
