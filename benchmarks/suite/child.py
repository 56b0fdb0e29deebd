"""The process of one cell. It answers requests, each one JSON object on a line.

    python child.py FILE.py KIN.py PARENT

Each cell has its own process, so cells of any system and in any virtual environment can alternate. FILE.py
defines the system: a class ``System`` with four methods.

- ``prepare(cell: dict, folder: str, seed: int) -> dict``: build everything, run nothing; return facts such as
  versions.
- ``iterate(count: int) -> dict``: run the next iterations; return ``iterations`` (number, wall seconds, tokens and
  metrics of each), ``evaluations``, and ``ended`` (True after the last iteration).
- ``observe() -> dict``: return the state at the end of a turn, such as an evaluation.
- ``close() -> None``: end everything that was started.

This file uses only the standard library, because another system's interpreter does not have rlflow. A request
is a line ``{"do": NAME, …}`` on standard input. The answer is a line ``{"value": …}`` or ``{"error": TEXT}``.
The system is closed when standard input ends. Output that the system prints goes to standard error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from typing import Any, TextIO


def load_system(path: str) -> Any:
    """Load the file at ``path``, and return an instance of its class ``System``."""
    # append instead of insert: a system's file may have the same name as its package, for example verl.py
    sys.path.append(os.path.dirname(os.path.abspath(path)))
    return _module("rlflow_bench_system", path).System()


def _module(name: str, path: str) -> Any:
    """Load a file as the module ``name``. Raises ImportError."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def answer(system: Any, request: dict[str, Any]) -> Any:
    """Call the system's method that a request names, and return the method's result."""
    method = request.pop("do")
    if method not in ("prepare", "iterate", "observe"):
        raise ValueError(f"there is no request '{method}'")
    return getattr(system, method)(**request)


def serve(path: str, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until standard input ends, then close the system.

    ``path``: the file that defines the system. Standard input also ends if the parent is killed.
    """
    system = None
    try:
        for line in requests:
            try:
                system = system or load_system(path)
                reply = {"value": answer(system, json.loads(line))}
            except BaseException as error:  # any exception that a system raises is sent as the answer
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}" if str(error) else type(error).__name__}
            print(json.dumps(reply), file=answers, flush=True)
    finally:
        if system is not None:
            system.close()


def end_with_parent(process_tag: str, parent: int) -> None:
    """Let the kernel kill this process when its parent ends, even during a turn (Linux).

    ``process_tag``: path of the module `rlflow.processes.watchdog.process_tag`. ``parent``: the parent's
    process id, which shows whether the parent has already ended.
    """
    _module("rlflow_kin", process_tag).die_with(parent)


def main() -> None:
    """Answer requests on the process's standard input and output. Prints go to standard error instead."""
    end_with_parent(sys.argv[2], int(sys.argv[3]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, answers)


if __name__ == "__main__":
    main()
