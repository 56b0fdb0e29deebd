"""A copy of the source tree, in which a mutant is applied and judged; the tree itself is never changed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

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
TEST_SECONDS = 60  # for one test, after which it has failed


@dataclass
class Tree:
    """folder: where the copy lies. failing: tests that fail there without any mutant, and judge nothing. sound: tests that do not."""

    folder: Path
    failing: set[str] = field(default_factory=set)
    sound: set[str] = field(default_factory=set)

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

    def verdict(self, path: Path, source: str, tests: list[str], seconds: float, stamp: int, slow: bool = False) -> tuple[str, str]:
        """(killed, survived or timeout; the test that failed) of a source of a mutant. stamp: seconds since 1970 that no earlier mutant
        had, so that no compiled module of it is taken for this one. slow: by tests that are marked so, in place of the others."""
        place = self.folder / path
        kept = place.read_bytes()
        try:
            while True:
                place.write_text(source)
                os.utime(place, (stamp, stamp))
                said, test = self._tested(tests, seconds, slow)
                place.write_bytes(kept)
                os.utime(place, (stamp + 1, stamp + 1))
                if said != "killed" or self._is_sound(test, seconds, slow):
                    return said, test
                self.failing.add(test)
        finally:
            place.write_bytes(kept)
            os.utime(place, (stamp + 1, stamp + 1))

    def _is_sound(self, test: str, seconds: float, slow: bool) -> bool:
        """Whether a test passes without the mutant. What fails before any test, as an import does, has no name and is the mutant's."""
        if test and test not in self.sound and self._tested([test], seconds, slow)[0] == "survived":
            self.sound.add(test)
        return not test or test in self.sound

    def _tested(self, tests: list[str], seconds: float, slow: bool) -> tuple[str, str]:
        left_out = [f"--deselect={test}" for test in sorted(self.failing)]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "slow" if slow else "not slow", "-p", "no:cacheprovider",
                   "--no-header", f"--timeout={4 * TEST_SECONDS if slow else TEST_SECONDS}", *left_out, *tests]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(self.folder / "site"), "RLFLOW_SKIP_ENGINES": "1"}
        process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   errors="replace", start_new_session=True)  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return "timeout", ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if process.returncode in (0, 5):  # 5: no test is left
            return "survived", ""
        failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+?\.py::.+?)(?: - .*)?$", printed, re.M)
        return "killed", failed[1] if failed else ""
