"""A copy of the source tree, in which a mutant is applied and judged; the tree itself is never changed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from judges import ROOT

FINDER = '''"""Imports rlflow from this copy, whatever is installed."""
import importlib.util, sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {{"rlflow": ROOT / "rlflow", "rlflow.algorithms": ROOT / "algorithms", "rlflow.backends": ROOT / "backends"}}


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in PLACES:
            place = PLACES[name]
            return importlib.util.spec_from_file_location(name, place / "__init__.py", submodule_search_locations=[str(place)])


sys.meta_path.insert(0, Finder)
'''.replace("{{", "{").replace("}}", "}")
TEST_SECONDS = 30  # for one test, after which it has failed
UNTOLD = "ignore::pytest.PytestAssertRewriteWarning"  # plugins that the server has imported before pytest looks for them


@dataclass
class Tree:
    """folder: where the copy lies. failing: tests that fail there without any mutant, and judge nothing. sound: tests that do not.
    server: the process whose forks run the tests (server.py)."""

    folder: Path
    failing: set[str] = field(default_factory=set)
    sound: set[str] = field(default_factory=set)
    server: subprocess.Popen[str] | None = None

    @classmethod
    def copied(cls, folder: Path) -> Tree:
        """All files that git tracks or would, as they are now."""
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(FINDER)
        return cls(folder)

    def verdict(self, path: Path, source: str, batches: list[tuple[list[str], bool]], seconds: float, stamp: int) -> tuple[str, str]:
        """(killed, killed slow, survived or timeout; the test that failed) of a source of a mutant. batches: test files, and whether those
        of their tests that are marked slow run, or the others. seconds: for all of them. stamp: seconds since 1970 that no earlier mutant
        had, so that no compiled module of it is taken for this one."""
        until = time.monotonic() + seconds
        for tests, slow in batches:
            while True:
                with self._applied(path, source, stamp):
                    said, test = self._tested(tests, max(until - time.monotonic(), 1.0), slow)
                if said != "killed" or self._is_sound(test, seconds, slow):
                    break
                self.failing.add(test)
            if said != "survived":
                return ("killed slow" if said == "killed" and slow else said), test
        return "survived", ""

    @contextlib.contextmanager
    def _applied(self, path: Path, source: str, stamp: int) -> Iterator[None]:
        """A file of the copy has this text meanwhile."""
        place = self.folder / path
        kept = place.read_bytes()
        try:
            place.write_text(source)
            os.utime(place, (stamp, stamp))
            yield
        finally:
            place.write_bytes(kept)
            os.utime(place, (stamp + 1, stamp + 1))

    def _is_sound(self, test: str, seconds: float, slow: bool) -> bool:
        """Whether a test passes without the mutant. What fails before any test, as an import does, has no name and is the mutant's."""
        if test and test not in self.sound and self._tested([test], seconds, slow)[0] == "survived":
            self.sound.add(test)
        return not test or test in self.sound

    def _tested(self, tests: list[str], seconds: float, slow: bool) -> tuple[str, str]:
        """The verdict of these tests on the copy as it is."""
        if not tests:
            return "survived", ""
        arguments = ["-x", "-q", "-m", "slow" if slow else "not slow", "-p", "no:cacheprovider", "--no-header", "-W", UNTOLD,
                     f"--timeout={4 * TEST_SECONDS if slow else TEST_SECONDS}", *(f"--deselect={test}" for test in sorted(self.failing)),
                     *tests]  # fmt: skip
        output = self.folder / "site" / "printed.txt"
        code = self._answer({"arguments": arguments, "seconds": seconds, "output": str(output)})
        if code is None:
            return "timeout", ""
        if code in (0, 5):  # 5: no test is left
            return "survived", ""
        failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+?\.py::.+?)(?: - .*)?$", output.read_text(errors="replace"), re.M)
        return "killed", failed[1] if failed else ""

    def _answer(self, request: dict[str, Any]) -> int | None:
        """What the process beside this tree says, which is started for the first request."""
        if self.server is None:
            environment = {**os.environ, "PYTHONPATH": str(self.folder / "site"), "RLFLOW_SKIP_ENGINES": "1", "OMP_NUM_THREADS": "1"}
            self.server = subprocess.Popen([sys.executable, "tests/mutation/server.py"], cwd=self.folder, env=environment, text=True,
                                           stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        assert self.server.stdin
        assert self.server.stdout
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        code: int | None = json.loads(self.server.stdout.readline())
        return code

    def close(self) -> None:
        """Ends the process beside this tree."""
        if self.server is not None:
            self.server.communicate()
            self.server = None
