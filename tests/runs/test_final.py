"""The results of a run: models that end their replies as in the run, files of answers that are complete or
absent, and a summary."""

import errno
import json
import os
import resource
import shutil
from types import SimpleNamespace

import pytest
from sources import TASKS

import rlflow
from rlflow.data.ends import ends_of
from rlflow.runs.final import _answers, answer_file, name_of

MODEL = TASKS / "arithmetic_model"


@pytest.mark.slow
def test_the_final_generation_config_names_every_end_token(tmp_path):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "top_k": 5}))
    run = rlflow.run(
        "grpo",
        model=str(folder),
        data="chain_sum",
        iterations=1,
        prompts=2,
        held_out=2,
        threads=1,
        out=str(tmp_path / "runs"),
        **{"hp.max_tokens": 8, "hp.samples": 2},
    )
    final = run.folder / "final" / "actor"
    written = json.loads((final / "generation_config.json").read_text())
    assert (written["eos_token_id"], written["top_k"]) == ([1, 7], 5), (
        "transformers alone writes no top_k without do_sample"
    )
    assert ends_of(final).problems == []
    usual = (run.folder / "settings.json").stat().st_mode
    # everyone who can read the other files can read the weights
    assert [path.name for path in final.iterdir() if path.stat().st_mode != usual] == []
    assert "name different tokens as the end of a reply" in (run.folder / "notes.txt").read_text()


def test_the_file_appears_when_all_answers_exist(tmp_path):
    path, failures = tmp_path / name_of(3), []
    with answer_file(path, failures.append) as keep:
        keep({"prompt": "\ud800", "sampled": []})
        keep({"prompt": "two"})
        assert not path.exists()
    assert [json.loads(line)["prompt"] for line in path.read_text().splitlines()] == ["\ud800", "two"]
    assert (os.listdir(path.parent), failures) == (["after-000003.jsonl"], [])


def interrupted(path):
    with answer_file(path, print) as keep:
        keep({"prompt": "one"})
        keep({"prompt": 1 / 0})


def test_an_evaluation_without_all_answers_leaves_no_file(tmp_path):
    path = tmp_path / name_of(0)
    with answer_file(path, print):
        pass
    assert not path.parent.exists()
    with pytest.raises(ZeroDivisionError):
        interrupted(path)
    assert os.listdir(path.parent) == []


def test_a_full_disk_is_reported_once_and_stops_nothing(tmp_path):
    failures, before = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, before[1]))  # like a full disk
    try:
        with answer_file(tmp_path / name_of(0), failures.append) as keep:
            keep({"prompt": "one"})
            keep({"prompt": "two"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [error.errno for error in failures] == [errno.EFBIG]
    assert os.listdir(tmp_path / "evaluations") == []


def test_five_answers_are_shown():
    rows = [{"prompt": f"q{n}", "answer": "a", "before": "b", "after": "c"} for n in range(7)]
    assert _answers(SimpleNamespace(answers=rows)).row_count == 5
