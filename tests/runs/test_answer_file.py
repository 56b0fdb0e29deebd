"""The file of an evaluation's answers is complete or absent."""

import errno
import json
import os
import resource

import pytest

from rlflow.runs.final import answer_file, name_of


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
