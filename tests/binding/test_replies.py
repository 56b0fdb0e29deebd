"""What model folders say of replies is judged for each folder that a flow samples with, and for that of the data's tokenizer."""

import json
import shutil
from pathlib import Path

import pytest

from rlflow.author.load import load_flow
from rlflow.binding.replies import reply_problems
from rlflow.cli.check import check_flow
from rlflow.runs.prepare import kept_files
from rlflow.trace.compile import compile_flow

MODEL = Path(__file__).parents[2] / "rlflow" / "tasks" / "arithmetic_model"


@pytest.fixture
def other(tmp_path):
    """A model folder whose generation config does not know the tokenizer's end of text, 1."""
    folder = shutil.copytree(MODEL, tmp_path / "other")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    return folder


def test_a_folder_is_named_once_and_one_that_samples_nothing_is_not(other):
    graph = compile_flow(load_flow("ppo")).graph
    assert list(reply_problems(graph, MODEL, {"critic": other})) == []
    assert len(list(reply_problems(graph, MODEL, {"actor": other}))) == len(list(reply_problems(graph, other, {"actor": other}))) == 1


def test_check_says_so_and_goes_on(other):
    report = check_flow("grpo", ["--model", str(other), "--data", "chain_sum"])
    assert report.ok
    assert [str(other) in problem.message for problem in report.problems if problem.code == "model-ends"] == [True]


def test_what_a_run_keeps_of_a_folder_that_speaks_names_every_end(other):
    assert json.loads(kept_files(other, replies=True)["generation_config.json"])["eos_token_id"] == [1, 7]
    assert kept_files(other, replies=False)["generation_config.json"] == (other / "generation_config.json").read_bytes()
    assert kept_files(MODEL, replies=True) == kept_files(MODEL, replies=False)
