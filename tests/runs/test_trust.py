"""A run's folder may come from somebody else: resume executes none of its files before they are known to be
the user's own or declared trusted."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import rlflow.algorithms
from rlflow.errors import PlanError
from rlflow.monitoring.outputs import make_reporter
from rlflow.monitoring.reporter import Quiet
from rlflow.runs import resume
from rlflow.runs.trust import doubted

STRANGER = 65534  # no user
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
FLOW = """
from pathlib import Path

from rlflow import flow, loss

Path({marker!r}).touch()

@loss
def gradient(new, scores):
    return -new.logprobs * scores[:, None], {{}}

@flow
def mine(prompts, actor, reward):
    rows = actor.generate(prompts, samples=2, max_tokens=4)
    rows |= reward(rows)
    actor.update(rows, gradient)
"""
REWARD = (
    "from pathlib import Path\nPath({marker!r}).touch()\n\ndef length(completion):\n    return "
    "float(len(completion))\n"
)


class Ground:
    """A run of ``mine.py`` with its reward in a project's folder, and a record of their execution."""

    def __init__(self, tmp_path):
        self.project, self.elsewhere, self.marker = (
            tmp_path / "project",
            tmp_path / "elsewhere",
            tmp_path / "executed",
        )
        self.flow, self.reward, self.run = (
            self.project / "mine.py",
            self.project / "judge.py",
            self.project / "runs" / "one",
        )
        for folder in (self.run, self.elsewhere):
            folder.mkdir(parents=True)
        self.flow.write_text(FLOW.format(marker=str(self.marker)))
        self.reward.write_text(REWARD.format(marker=str(self.marker)))
        self.save()

    def save(self, **changes):
        values = {"reward": [f"{self.reward}:length:0.5"], "backend": "null"} | changes.pop("values", {})
        saved = {
            "file": str(self.flow),
            "flow": "mine",
            "values": values,
            "hp": {},
            "started_in": str(self.project),
            **changes,
        }
        (self.run / "settings.json").write_text(json.dumps(saved))

    def doubts(self):
        saved = resume.read_settings(self.run)
        return [str(doubt) for doubt in doubted(self.run, saved, resume.unchanged_settings(saved, {}))]

    def refused(self, **options):
        with pytest.raises(PlanError) as refused:
            resume.resume(self.run, {}, Quiet(), **options)
        assert not self.marker.exists()
        return str(refused.value)


@pytest.fixture
def ground(tmp_path, monkeypatch):
    made = Ground(tmp_path)
    monkeypatch.chdir(made.elsewhere)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return made


def test_an_own_run_in_its_start_folder_needs_no_trust(ground):
    assert ground.doubts() == []


def test_a_package_next_to_a_foreign_flow_is_in_doubt_too(ground):
    package = ground.project / "engine_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    far = ground.elsewhere / "one"
    ground.run.rename(far)
    ground.run = far
    ground.save(values={"backend": "engine_of_mine", "reward": []}, started_in=str(ground.elsewhere))
    assert {doubt.partition(": ")[0] for doubt in ground.doubts()} == {
        str(ground.flow),
        str(package / "__init__.py"),
        str(package),
    }


def test_a_packaged_algorithm_never_needs_trust(ground):
    ground.save(
        file=str(Path(rlflow.algorithms.__file__).parent / "grpo.py"),
        flow="grpo",
        values={"reward": ["task"]},
    )
    ground.run.chmod(0o777)
    assert ground.doubts() == []


@as_root
@pytest.mark.parametrize("theirs", ["run", "settings", "flow"])
def test_files_of_another_user_are_refused_before_execution(ground, theirs):
    paths = {"run": ground.run, "settings": ground.run / "settings.json", "flow": ground.flow}
    os.chown(paths[theirs], STRANGER, STRANGER)
    said = ground.refused()
    assert f"it belongs to user {STRANGER}" in said
    assert str(ground.flow) in said
    assert (str(ground.reward) in said) == (theirs != "flow")
    assert "--trust" in said


@pytest.mark.parametrize("open_to_all", ["run", "flow", "reward", "project"])
def test_files_writable_by_others_are_refused(ground, open_to_all):
    path = getattr(ground, open_to_all)
    path.chmod(path.stat().st_mode | 0o002)
    refused = ground.refused()
    assert "(mode " in refused or "found rights " in refused


def test_code_in_the_run_folder_is_refused_also_through_a_link(ground):
    evil = ground.run / "evil.py"
    shutil.copy(ground.flow, evil)
    ground.save(file=str(evil))
    assert ground.refused().count("evil.py: it is in the run's own folder") == 1
    (ground.project / "link.py").symlink_to(evil)
    ground.save(file=str(ground.project / "link.py"))
    assert "it is in the run's own folder" in ground.refused()


def test_a_copied_run_names_files_outside_the_users_folder(ground, tmp_path):
    """An example is a script of the user's own that must not be executed here."""
    other = tmp_path / "scripts"
    other.mkdir()
    script = shutil.copy(ground.flow, other / "clean.py")
    ground.save(file=str(script))
    assert "clean.py: it is not the file that the run was started with" in ground.refused()
    ground.save(file=str(script), started_in=None)
    assert "clean.py: it is not the file" in ground.refused()


def test_the_started_file_may_be_anywhere_until_it_changes(ground, tmp_path, monkeypatch):
    folder = tmp_path / "algorithms"
    folder.mkdir()
    flow = Path(shutil.move(ground.flow, folder / "mine.py"))
    result = rlflow.run(
        str(flow),
        backend="null",
        prompts=2,
        iterations=1,
        reward=f"{ground.reward}:length",
        held_out=0,
        out=str(tmp_path / "out" / "runs"),
    )
    ground.marker.unlink()
    ground.run = result.folder
    monkeypatch.chdir(ground.project)
    assert ground.doubts() == []
    flow.write_text(flow.read_text() + "print('changed')\n")
    assert "mine.py: it is not the file that the run was started with" in ground.refused()
    flow.write_text(flow.read_text().replace("print('changed')", "# a comment"))
    assert ground.doubts() == []


def test_only_backends_brought_by_the_run_are_checked(ground):
    ground.save(values={"backend": "own.engine", "actor.trainer": "torch.nn", "actor.generator": "local"})
    assert ground.doubts() == []
    package = ground.project / "own"
    package.mkdir()
    (package / "__init__.py").write_text(f"from pathlib import Path\nPath({str(ground.marker)!r}).touch()\n")
    assert ground.doubts() == []
    package.chmod(0o777)
    assert any(str(package) in doubt for doubt in ground.doubts())
    assert not ground.marker.exists()


def test_trusted_files_are_listed_and_executed(ground, capsys):
    result = rlflow.run(
        str(ground.flow),
        backend="null",
        prompts=2,
        iterations=1,
        reward=f"{ground.reward}:length",
        held_out=0,
        reward_write=(str(ground.marker.parent),),
        save_every=1,
        out=str(ground.project / "runs"),
    )
    ground.marker.unlink()
    ground.run = result.folder
    ground.flow.chmod(0o666)
    ground.refused()
    resume.resume(ground.run, {"iterations": 2}, make_reporter(quiet=False), trust=True)
    assert (
        f"executed because of --trust: {ground.flow}: other users can write to it (mode 666)"
        in capsys.readouterr().out
    )
    assert ground.marker.exists()


def test_reading_a_foreign_run_executes_nothing(ground):
    from rlflow.cli import resume as exports
    from rlflow.cli import watch

    result = rlflow.run(
        "grpo", backend="null", prompts=2, iterations=1, name="two", out=str(ground.project / "runs")
    )
    ground.run = result.folder
    ground.save(options={}, graph="0", rlflow="0", torch="0", threads=1)
    watch.list_runs(str(ground.project / "runs"))
    watch.show_run(str(result.folder))
    watch.watch_run(str(result.folder), True)
    with pytest.raises(PlanError):  # null engines do not have models
        exports.export_model(str(result.folder), str(ground.elsewhere / "out"), None)
    assert not ground.marker.exists()
