"""The process of one cell: it answers lines of JSON, so that cells of any system, in any virtual environment,
can take turns.

    python child.py FILE.py KIN.py PARENT

FILE.py defines the system: a class ``System`` with four methods.

    prepare(cell: dict, folder: str, seed: int) -> dict     make all that is needed, and run nothing yet;
    facts such as versions iterate(count: int) -> list[dict]                       the next iterations; of
    each its seconds and tokens, and its metrics observe() -> dict                                       what
    is known at the end of a turn, such as an evaluation close() -> None
    end what was started

This file needs the standard library alone, since the interpreter of another system may have nothing else of
rlflow's. A request is a line ``{"do": NAME, …}`` on standard input; the answer a line ``{"value": …}`` or
``{"error": TEXT}``. The end of standard input closes the system. What it prints goes to standard error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from typing import Any, TextIO


def load_system(path: str) -> Any:
    """An object of the class ``System`` that a file defines."""
    # last: a system may have the name of the package that it is of
    sys.path.append(os.path.dirname(os.path.abspath(path)))
    return _module("rlflow_bench_system", path).System()


def _module(name: str, path: str) -> Any:
    """The module that a file is, loaded under a name. Raises ImportError."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def answer(system: Any, request: dict[str, Any]) -> Any:
    """Do what a request asks for."""
    verb = request.pop("do")
    if verb not in ("prepare", "iterate", "observe"):
        raise ValueError(f"there is no request '{verb}'")
    return getattr(system, verb)(**request)


def serve(path: str, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more, which is also how a parent that was killed is noticed; then
    close the system."""
    system = None
    try:
        for line in requests:
            try:
                system = system or load_system(path)
                reply = {"value": answer(system, json.loads(line))}
            except BaseException as error:  # whatever a system raises is its answer
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}" if str(error) else type(error).__name__}
            print(json.dumps(reply), file=answers, flush=True)
    finally:
        if system is not None:
            system.close()


def end_with_parent(kin: str, parent: int) -> None:
    """Have the kernel kill this process when its parent ends, in the middle of a turn too (Linux). ``kin``:
    the file of `rlflow.processes.watchdog.kin`; a parent that has ended before is noticed by its process
    id."""
    _module("rlflow_kin", kin).die_with(parent)


def main() -> None:
    """Serve on what were standard input and output when the process began."""
    end_with_parent(sys.argv[2], int(sys.argv[3]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, answers)


if __name__ == "__main__":
    main()
