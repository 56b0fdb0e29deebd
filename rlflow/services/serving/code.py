"""`rlflow serve code` runs untrusted Python code. It accepts requests in SandboxFusion's format.

``POST /run_code`` with ``{"code": …, "language": "python", "stdin": …, "run_timeout": …, "memory_limit_MB":
…, "files": {name: base64}}`` returns ``{"status": "Success" | "Failed" | "SandboxError", "message": …,
"run_result": {"status", "return_code", "stdout", "stderr", "execution_time"}, …}``. Each request runs in a
sandboxed process of its own, which has no network, can't start programs, can't see other processes and can't
write files. It can read only the request's files, the interpreter and the installed packages.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from annotated_types import MaxLen
from pydantic import BaseModel

from rlflow.errors import PlanError, listed
from rlflow.extras import require
from rlflow.processes.sandbox import probe
from rlflow.rewards.environments.shipped import sandboxed
from rlflow.services.serving.server import EXTRA, application

LANGUAGES = ("python",)  # supported languages
SECONDS, LONGEST = 10.0, 60.0  # time limit of a request: default, maximum
MEGABYTES, MOST_MEGABYTES = 512, 4096  # memory limit of a request: default, maximum
FILES = 1000  # most files of a request
BODY = 16 << 20  # maximum size of a request's body in bytes
PREFIX = "rlflow-code-"  # prefix of the names of servers' temporary folders


class Code(BaseModel):
    """A request to /run_code."""

    code: str
    language: str = "python"
    stdin: str | None = None
    run_timeout: float = SECONDS
    compile_timeout: float = SECONDS
    memory_limit_MB: int = -1
    files: Annotated[dict[str, str | None], MaxLen(FILES)] = {}
    fetch_files: list[str] = []


def runner(parallel: int, unsafe: bool = False) -> Any:
    """Return the web application that runs code, in up to ``parallel`` processes at once.

    Raises PlanError if this machine lacks some part of the sandbox, unless ``unsafe`` is true.
    """
    lacks = probe.missing("code")
    if lacks and not unsafe:
        raise PlanError.of(
            "serve-unsafe",
            "this machine cannot sandbox untrusted code",
            found=f"no protection of {listed(lacks)}",
            expected="everything that rlflow doctor lists under isolation",
            remedy="use a newer Linux; or --unsafe, in a container that contains nothing else",
        )
    workers = require("anyio.to_thread", EXTRA)
    folder = Folder()
    isolation = {name: name not in lacks for name in probe.around("code")}
    app = application(
        "code",
        lambda: {"isolation": isolation, "languages": list(LANGUAGES), "parallel": parallel},
        BODY,
        folder.remove,
    )
    turns = require("anyio", EXTRA).CapacityLimiter(parallel)  # a waiting request does not occupy a thread

    async def run_code(request: Code) -> dict[str, Any]:
        answer: dict[str, Any] = await workers.run_sync(run_request, request, folder.path, limiter=turns)
        return answer

    app.add_api_route("/run_code", run_code, methods=["POST"])
    return app


class Folder:
    """A server's temporary folder, with a subfolder for each request.

    It stays locked while the server runs. If the server is killed, the next one finds the folder unlocked and
    removes it.
    """

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            _remove_left(left)
        made = tempfile.mkdtemp(prefix=f"making-{PREFIX}")
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = str(Path(made).with_name(Path(made).name.removeprefix("making-")))
        os.rename(made, self.path)

    def remove(self) -> None:
        """Remove the folder. Call this when the server ends."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_left(path: Path) -> None:
    """Remove the folder of a server that is no longer running, if it belongs to this user."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(file)


def run_request(request: Code, where: str | None = None) -> dict[str, Any]:
    """Run the code in a request, and return the response in SandboxFusion's format.

    ``where``: where to create a folder for the request; None for the system's temporary folder.
    """
    refused = unsupported(request)
    if refused:
        return _answer("SandboxError", refused, None)
    with tempfile.TemporaryDirectory(prefix="request-", dir=where) as folder:
        try:
            _place(request.files, Path(folder))
        except (ValueError, OSError) as error:
            return _answer("SandboxError", f"files: {error}", None)
        result = _run(request, folder)
    good = result["status"] == "Finished" and result["return_code"] == 0
    return _answer("Success" if good else "Failed", "", result)


def unsupported(request: Code) -> str:
    """Return why a request isn't supported, or "" if it is."""
    if request.language not in LANGUAGES:
        return f"language: found {request.language!a}, expected one of {listed(LANGUAGES)}"
    for name, text in (("code", request.code), ("stdin", request.stdin or "")):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            return f"{name}: found a lone surrogate, expected text"
    return (
        "fetch_files: code cannot write files, so there are no files to fetch" if request.fetch_files else ""
    )


def _answer(status: str, message: str, result: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": result,
        "executor_pod_name": None,
        "files": {},
    }


def _place(files: Mapping[str, str | None], folder: Path) -> None:
    """Write a request's files to ``folder``.

    ``files``: name → base64 content. Raises ValueError or OSError if a name points outside the folder or
    content isn't base64.
    """
    for name, content in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"found the name {name!r}, expected a path below the working folder")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            (folder / path).write_bytes(base64.b64decode(content or "", validate=True))
        except binascii.Error as error:
            raise ValueError(f"{name!r} is not base64: {error}") from None


def _run(request: Code, folder: str) -> dict[str, Any]:
    """Run the code in a separate process and return the response. The process is killed at its deadline."""
    memory = min(request.memory_limit_MB, MOST_MEGABYTES) if request.memory_limit_MB > 0 else MEGABYTES
    seconds = min(request.run_timeout if request.run_timeout > 0 else SECONDS, LONGEST)
    done = sandboxed.ended(request.code, folder, memory, seconds, request.stdin or "")
    return {
        "status": "TimeLimitExceeded" if done.late else "Finished",
        "execution_time": round(done.seconds, 3),
        "return_code": None if done.late else done.code,
        "stdout": done.stdout,
        "stderr": done.stderr,
    }
