"""`python benchmarks/gpu.py` on a CPU, and its report of sections that fail."""

import contextlib
import json
import os
import select
import site
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT

COMMAND = ROOT / "benchmarks" / "gpu.py"
QUICK = [
    "same",
    "ppo",
    "grpo",
    "repeats",
    "devices",
    "variants",
    "waits",
    "qwen3-0.6b",
    "micro",
    "sleep",
    "limit",
    "handles",
    "fsdp",
]
ON_GPUS = {
    "same: TF32",
    "waits: waits for the device",
    "micro: peaks",
    "sleep: freed memory",
    "handles: NCCL with two ranks on one device",
    "handles: memory of a rank that dies",
}


def ended(folder, *words, code=0):
    """Run the command in a checkout; return its JSON file and its output.

    The packages that rlflow needs are installed, but rlflow itself is not.
    """
    out = folder / "gpu.json"
    # -S skips the .pth files, one of which makes rlflow importable
    packages = {"PYTHONPATH": os.pathsep.join(site.getsitepackages())}
    done = subprocess.run(
        [sys.executable, "-S", COMMAND, "--device", "cpu", "--small", "--json", out, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **packages},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.mark.long
def test_quick_sections_pass_on_a_cpu(tmp_path):
    found, printed = ended(tmp_path)
    assert [section["name"] for section in found["sections"]] == QUICK
    assert {section["name"]: section["verdict"] for section in found["sections"]} == dict.fromkeys(
        QUICK, "ok"
    )
    checks = {
        f"{section['name']}: {check['name']}": check
        for section in found["sections"]
        for check in section["checks"]
    }
    assert {name for name, check in checks.items() if check["verdict"] != "ok"} == ON_GPUS
    assert all(check["why"] for check in checks.values() if check["verdict"] == "untested")
    assert checks["same: logprobs, float32"] == {
        "name": "logprobs, float32",
        "verdict": "ok",
        "number": 0.0,
        "unit": "",
        "why": "",
        "bound": "≤ 0.0001",
    }
    assert found["machine"]["packages"]["torch"]
    assert "| `fsdp` | FSDP2 on one rank | ok | 6 | 0 | 0 |" in printed
    assert list(tmp_path.iterdir()) == [tmp_path / "gpu.json"]


def test_sections_are_selected_by_name_and_group(tmp_path):
    def listed(*words):
        return subprocess.run([sys.executable, COMMAND, *words], capture_output=True, text=True, cwd=tmp_path)

    lines = [line.split(maxsplit=4) for line in listed("--list").stdout.splitlines()]
    names = [name for name, *_ in lines]
    assert set(QUICK) < set(names)
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert [name for name in names if f"`{name}`" not in page] == []
    wrong = listed("--device", "cpu", "nonsense")
    assert wrong.returncode == 2
    assert "there is no section 'nonsense'" in wrong.stderr
    spent, _ = ended(tmp_path, "--budget", "1", "memory", "vllm")
    assert [(section["name"], section["verdict"]) for section in spent["sections"]] == [
        ("micro", "untested"),
        ("sleep", "untested"),
        ("limit", "untested"),
        ("vllm", "untested"),
    ]
    assert {check["why"] for section in spent["sections"] for check in section["checks"]} == {
        "the budget is used up"
    }


@pytest.mark.long
def test_a_failing_section_is_reported_with_its_cause(tmp_path):
    script = Path(__file__).with_name("bad_sections.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(COMMAND.parent)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    one = ["one", "ok", ""]
    assert found["good"] == [one, ["two", "untested", "no reason"]]
    assert found["crashes"] == [one, ["exit", "failed", found["crashes"][1][2]]]
    assert found["crashes"][1][2].startswith("signal SIGABRT: ")
    assert found["leaves"] == [one, ["exit", "failed", "exit 3: "]]
    (first, error), (before, late) = found["raises"], found["hangs"]
    assert first == before == one
    assert error[:2] == ["error", "failed"]
    assert error[2].startswith("ValueError: the reason (bad_sections.py:")
    assert late[:2] == ["deadline", "failed"]
    assert late[2].startswith("did not end; it was in bad_sections.py:")
    assert " in stuck < bad_sections.py:" in late[2]
    assert (tmp_path / "good.log").read_text() == "this goes to its log\n"
    assert ends(int((tmp_path / "child").read_text()))


def ends(process, seconds=30):
    """Return whether a process ends within ``seconds``; it need not be a child of this one."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process)
        try:
            return bool(select.select([handle], [], [], seconds)[0])
        finally:
            os.close(handle)
    return True


@pytest.mark.long
@pytest.mark.timeout(900)
def test_backend_sections_pass_on_a_cpu(tmp_path):
    """One command runs them all; its sections fork from one process that has imported the shared modules."""
    found, _ = ended(tmp_path, "zero", "vllm", "pools")
    lacking = {
        section["checks"][0]["why"] for section in found["sections"] if section["verdict"] == "untested"
    }
    for section in found["sections"]:
        assert section["verdict"] in ("ok", "untested"), section
        unlike = {check["name"] for check in section["checks"] if check["verdict"] != "ok"}
        assert section["verdict"] == "untested" or unlike <= {"CUDA graphs"}, section
    assert [why for why in lacking if not why.startswith("not installed: ")] == []
    if lacking:
        pytest.skip("; ".join(sorted(lacking)))


def test_a_missing_device_is_reported(tmp_path):
    done = subprocess.run(
        [sys.executable, COMMAND, "same"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2
    assert "no NVIDIA driver" in done.stdout or "Error: " in done.stdout
