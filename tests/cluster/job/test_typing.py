"""A type checker knows the methods of a role's class, their arguments and their results."""

import re
import subprocess
import sys

import pytest
from sources import ROOT

SETTINGS = f"""
[mypy]
strict = true
mypy_path = {ROOT}
[mypy-torch.*,numpy.*,ray.*,transformers.*,msgpack.*,psutil.*]
follow_imports = skip
ignore_missing_imports = true
[mypy-rlflow.*]
ignore_errors = true
"""
SCRIPT = """
from rlflow import Batch
from rlflow.cluster import Job, gather

class Policy:
    def load(self, path: str, *, strict: bool = True) -> int: ...
    def save(self, path: str, deep: bool = False) -> str: ...
    def forward(self, batch: Batch, plus: int = 0) -> Batch: ...

class Critic:
    def load(self, path: str) -> int: ...

job = Job("mine")
actor = job.role("actor", Policy, ranks=2)
reveal_type(actor)  # Group[script.Policy]
reveal_type(actor.call(Policy.load, "a", strict=False).result())  # list[int]
reveal_type(actor.call_rank0(Policy.save, "a", seconds=60).result())  # str
reveal_type(actor.call_rank0(Policy.save, "a", True, seconds=60).result())  # str
reveal_type(actor.call_batch(Policy.forward, Batch.of(), plus=1).result())  # Batch
reveal_type(actor.call_each(Policy.save, ["a", "b"]).result())  # list[str]
reveal_type(gather(actor.call(Policy.load, "a"), actor.call_rank0(Policy.save, "a"), seconds=6))  # tuple[list[int], str]
actor.call(Policy.load, 3)  # error
actor.call(Policy.load)  # error
actor.call(Policy.load, "a", strct=True)  # error
actor.call(Critic.load, "a")  # error
actor.call("load", "a")  # error
actor.call_rank0(Policy.save, 3, seconds=60)  # error
actor.call_batch(Policy.forward, Batch.of(), plus="1")  # error
actor.call_batch(Policy.save, "a")  # error
actor.call_each(Policy.save, [1])  # error
"""


@pytest.mark.slow
def test_results_have_their_types_and_wrong_calls_are_found(tmp_path):
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    (tmp_path / "script.py").write_text(SCRIPT.replace("...\n", "raise NotImplementedError\n"))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    said = {}
    for line in checked.stdout.splitlines():
        if match := re.match(r"script\.py:(\d+): (error|note): (.*)", line):
            said.setdefault(int(match[1]), []).append((match[2], match[3]))
    for number, line in enumerate(SCRIPT.splitlines(), 1):
        expected = line.rpartition("  # ")[2] if "  # " in line else ""
        found = said.get(number, [])
        if expected == "error":
            assert any(kind == "error" for kind, _ in found), line
        elif expected:
            shown = re.sub(
                r"\b(?:builtins|rlflow\.[\w.]+)\.",
                "",
                next(text for kind, text in found if text.startswith("Revealed")),
            )
            assert expected in shown, (line, shown)
        assert expected == "error" or not any(kind == "error" for kind, _ in found), (line, found)
