"""Every change that a run makes in its folder goes through the modules that write complete files, or into a
folder that gets its name when it is complete."""

import os
import sys
from pathlib import Path

import pytest
from run_faults import in_child, run

import rlflow
from rlflow.checkpoints import durable, lock, logs
from rlflow.monitoring.outputs import make_reporter
from rlflow.runs import resume

OWNERS = {module.__file__ for module in (durable, logs, lock)}
CHANGES = {
    "os.rename": (0, 1),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.truncate": (0,),
    "os.link": (0, 1),
    "os.symlink": (1,),
}  # positions of paths in the arguments of audit events
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def changed(event, args):
    """Return the paths changed by an audit event."""
    if event == "open":
        path, mode, flags = args
        writes = (
            bool(flags & WRITING) if isinstance(flags, int) else any(letter in str(mode) for letter in "wax+")
        )
        return [path] if writes else []
    return [args[place] for place in CHANGES.get(event, ())]


def stray(root, found):
    """Return a hook that records changes below ``root`` not made by an owner."""

    def hook(event, args):
        for path in changed(event, args):
            if isinstance(path, str | bytes | os.PathLike) and Path(os.fsdecode(path)).is_relative_to(root):
                aside = any(
                    part.startswith((".writing-", ".removing-")) for part in Path(os.fsdecode(path)).parts
                )
                frame, files = sys._getframe(1), set()
                while frame is not None:
                    files.add(frame.f_code.co_filename)
                    frame = frame.f_back
                if not files & OWNERS and not aside and Path(os.fsdecode(path)) != root:
                    found.append(f"{event} {path}")

    return hook


def check_owned(root, action):
    """Run an action in a child and check its changes; in a child, because an audit hook cannot be removed."""

    def watched():
        found = []
        sys.addaudithook(stray(root, found))
        action()
        assert found == []
        (root / "stray").write_text("")
        assert found == [f"open {root / 'stray'}"]  # the hook sees this

    assert in_child(watched) == 0


def test_a_run_and_its_resume_change_the_folder_only_through_owners(tmp_path):
    def both():
        folder = rlflow.run(
            "grpo", backend="null", prompts=4, iterations=2, save_every=1, out=str(tmp_path / "runs")
        ).folder
        resume.resume(folder, {"iterations": 3}, make_reporter(quiet=True))

    check_owned(tmp_path / "runs", both)


@pytest.mark.slow
def test_a_run_with_models_changes_the_folder_only_through_owners(task, tmp_path):
    check_owned(
        tmp_path / "runs",
        lambda: run("grpo", {**task, "iterations": 1, "prompts": 4, "held_out": 4}, "models", prompts=4),
    )
