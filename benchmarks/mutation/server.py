"""Run pytest in forks of one process that has imported the slow packages (PyTorch, transformers), but not rlflow.

A request is a line of JSON on standard input: the arguments, the time limit in seconds, and the file for the
output. The answer is a line of JSON: the exit status, or null after the time limit. Processes that a fork
leaves running are killed.
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
    """Run pytest in a fork, and return its exit status; None if it did not end within ``seconds``.

    ``output``: the file for its output.
    """
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
    """Kill processes that the fork left running.

    These processes are now children of this process, which is their subreaper.
    """
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(psutil.Process().children(), 10)


def _run(arguments: list[str], output: str) -> None:
    """Run pytest in the fork, then exit the fork."""
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
    # put the working directory first, as `python -m pytest` does, instead of this file's folder
    sys.path[0] = os.getcwd()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in WARM:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(tested(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
