"""Runs pytest in forks of one process that has imported what takes seconds: PyTorch, transformers and pytest,
and nothing of rlflow.

A line of JSON on standard input names the arguments, the seconds that are left and the file for what is
printed; the answer is a line of
JSON: the exit status, null where the time was over. Whatever a fork leaves running ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import traceback

import choosing  # noqa: F401, a plugin of the forks, which do not find it by its name
import psutil

WARM = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "hypothesis",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.gpt2.modeling_gpt2",
    "safetensors.torch",
    "networkx",
    "numpy",
    "pydantic",
    "typer",
    "rich.console",
    "jinja2",
    "msgpack",
    "psutil",
    "pytest",
)

PR_SET_CHILD_SUBREAPER = 36


def tested(arguments: list[str], seconds: float, output: str) -> int | None:
    """The exit status of pytest with these arguments, None where it did not end within so many seconds."""
    child = os.fork()
    if not child:
        _run(arguments, output)
    ended = os.pidfd_open(child)
    try:
        in_time = bool(select.select([ended], [], [], seconds)[0])
    finally:
        os.close(ended)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        _end_orphans()
    return os.waitstatus_to_exitcode(status) if in_time else None


def _end_orphans() -> None:
    """What the fork has started and left, in whatever session: it has become this process's."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(psutil.Process().children(), 10)


def _run(arguments: list[str], output: str) -> None:
    """The life of a fork."""
    code = 1
    try:
        os.setsid()
        printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, place in ((nothing, 0), (printed, 1), (printed, 2)):
            os.dup2(descriptor, place)
        sys.argv = ["pytest", *arguments]
        code = int(importlib.import_module("pytest").main(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    sys.path[0] = os.getcwd()  # as `python -m pytest` has it, not the folder of this file
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in WARM:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(tested(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
