"""Copies of a source tree with their own environment, in which mutants are tested.

The original tree is never changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("server.py")
SLOWER = 5  # a test may take this many times its normal time, plus `spare` seconds
# pytest warns because the server has already imported the plugins
IGNORED_WARNING = "ignore::pytest.PytestAssertRewriteWarning"


@dataclass
class Tree:
    """A copy of a source tree.

    ``folder``: the copy's folder. ``options``: pytest options for every call. ``failing``: tests that fail
    even without a mutant, and are ignored. ``sound``: tests that pass without a mutant. ``spare``: seconds
    added to every time limit. ``server``: the process whose forks run the tests (server.py).
    """

    folder: Path
    options: list[str] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)
    sound: set[str] = field(default_factory=set)
    spare: float = 60.0
    server: subprocess.Popen[str] | None = None

    @classmethod
    def copied(cls, root: Path, folder: Path, options: Sequence[str] = ()) -> Tree:
        """Copy the current files of a tree, except those that git ignores, and link the tree's environment.

        The copied tree is installed in the linked environment.
        """
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.split(
            "\0"
        )
        for name in filter(None, names):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        tree = cls(folder, list(options))
        tree._install(root)
        return tree

    @property
    def python(self) -> Path:
        return self.folder / ".venv" / "bin" / "python"

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.folder / ".venv")}))

    def _install(self, root: Path) -> None:
        """Link the environment of a tree, file by file.

        Files that contain the tree's path are rewritten instead.
        """
        shutil.copytree(root / ".venv", self.folder / ".venv", symlinks=True, copy_function=_linked)
        own = [
            *(self.folder / ".venv" / "bin").iterdir(),
            *self.packages.glob("__editable__*"),
            self.folder / ".venv" / "pyvenv.cfg",
        ]
        for path in own:
            if path.is_file() and not path.is_symlink() and str(root).encode() in (text := path.read_bytes()):
                mode = path.stat().st_mode
                path.unlink()
                path.write_bytes(text.replace(str(root).encode(), str(self.folder).encode()))
                path.chmod(mode)

    @contextlib.contextmanager
    def changed(self, path: Path, source: str, stamp: int) -> Iterator[None]:
        """Inside the context, replace the text of a file in the copy with ``source``.

        ``stamp``: modification time in seconds since 1970. It must be newer than before, so that Python
        compiles the file again.
        """
        place = self.folder / path
        kept = place.read_bytes()
        try:
            place.write_text(source)
            os.utime(place, (stamp, stamp))
            yield
        finally:
            place.write_bytes(kept)
            os.utime(place, (stamp + 1, stamp + 1))

    def killer(
        self, path: Path, source: str, stages: Sequence[Sequence[str]], seconds: dict[str, float], stamp: int
    ) -> str | None:
        """Return the first test that kills a mutant; None if there is no such test.

        The test must fail with the mutant, fail again when it runs alone, and pass without the mutant.
        ``source``: text of the file ``path`` with the mutant. ``stages``: tests in stages, which run one
        after another. ``seconds``: the normal seconds of each test. ``stamp``: see `changed`.
        """
        for stage in stages:
            left = list(stage)
            while left := [test for test in left if test not in self.failing]:
                with self.changed(path, source, stamp):
                    failed, ended = self.tested(left, seconds)
                if failed is None:
                    break
                if self._is_sound(failed, seconds):
                    with self.changed(path, source, stamp):
                        again, _ = self.tested([failed], seconds)
                    if again is not None:
                        return failed
                left = [
                    test for test in left if test not in {*ended, failed} and test.split("::")[0] != failed
                ]
        return None

    def _is_sound(self, test: str, seconds: dict[str, float]) -> bool:
        """Whether a test passes without a mutant."""
        if test not in self.sound | self.failing:
            (self.failing if self.tested([test], seconds)[0] is not None else self.sound).add(test)
        return test in self.sound

    def tested(self, tests: list[str], seconds: dict[str, float]) -> tuple[str | None, set[str]]:
        """Run tests in the copy, until one fails.

        Returns (the first test that fails or does not end, tests that ended). The first value may also be a
        test file. It is None if all tests pass. ``seconds``: the normal seconds of each test.
        """
        choice = self.folder / "choice"
        choice.mkdir(exist_ok=True)
        (choice / "tests.json").write_text(json.dumps(tests))
        (choice / "log.jsonl").write_text("")
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))
        longest = self.spare + SLOWER * max(seconds.get(test, 0.0) for test in tests)
        arguments = [
            "-x",
            "-q",
            "-p",
            "choosing",
            "-p",
            "no:cacheprovider",
            "--no-header",
            "-W",
            IGNORED_WARNING,
            f"--timeout={longest:.0f}",
            f"--basetemp={self.folder.parent / 'p'}",
            *self.options,
            *files,
        ]
        arguments += [] if "::" in tests[0] else ["--collect-only"]
        limit = self.spare + longest + SLOWER * sum(seconds.get(test, 0.0) for test in tests)
        code = self._answer({"arguments": arguments, "seconds": limit, "output": str(choice / "printed.txt")})
        events = [json.loads(line) for line in (choice / "log.jsonl").read_text().splitlines()]
        ended = {test for what, test in events if what == "ended"}
        if code in (0, 5):  # 5: no tests were collected
            return None, ended
        named = [test for what, test in events if what == "failed"] or [
            test for what, test in events if what == "began" and test not in ended
        ]
        return (named or files)[0], ended

    def _answer(self, request: dict[str, Any]) -> int | None:
        """Send a request to the server process, and return the answer. Starts the process if necessary."""
        if self.server is None:
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RLFLOW_MUTATION_CHOICE": str(self.folder / "choice"),
            }
            self.server = subprocess.Popen(
                [str(self.python), str(SERVER)],
                cwd=self.folder,
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self.server.stdin
        assert self.server.stdout
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        code: int | None = json.loads(self.server.stdout.readline())
        return code

    def close(self) -> None:
        """End the server process."""
        if self.server is not None:
            self.server.communicate()
            self.server = None


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a link to another file system is not possible
        shutil.copy2(source, target)
