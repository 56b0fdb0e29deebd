"""The list of response lengths that all systems of a comparison use."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.author.axis import Axis
from rlflow.benchmarks.lengths import recorded_lengths
from rlflow.cli.main import exit_code
from rlflow.config.flags import sort_values
from rlflow.errors import PlanError
from rlflow.training.protocols import Sampling


def answers(folder, *rows):
    path = folder / "after-000000.jsonl"
    path.write_text(
        "".join(json.dumps({"sampled": [{"tokens": tokens} for tokens in row]}) + "\n" for row in rows)
    )
    return path


def test_recorded_lengths_become_a_runs_setting(tmp_path, capsys):
    out = tmp_path / "lengths.json"
    assert exit_code(["bench", "record", str(answers(tmp_path, [3, 9], [1, 4])), "-o", str(out)]) == 0
    assert "4 lengths from 1 to 9, mean 4.2" in capsys.readouterr().out
    assert sort_values({"actor.generate.lengths": str(out)}, ["actor"]).sampling == {
        "actor.generate": {"lengths": (3, 9, 1, 4)}
    }


@pytest.mark.parametrize("text", ["", "{}", '{"sampled": [{}]}', '{"sampled": [{"tokens": 0}]}', "no JSON"])
def test_a_file_without_lengths_is_refused(text, tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(PlanError, match="no answers with their numbers of tokens"):
        recorded_lengths(path)
    assert exit_code(["bench", "record", str(path)]) == 2


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    samples=st.integers(1, 4),
    prompts=st.integers(1, 5),
    start=st.integers(0, 50),
)
def test_a_rows_length_follows_its_number_in_the_stream(lengths, samples, prompts, start):
    sampling, axis = (
        Sampling(samples, 16, stop=("x",), lengths=tuple(lengths)),
        Axis.fresh(prompts, start).repeat(samples),
    )
    every = sampling.of_rows(axis.keys)
    first = start * samples
    assert [one.max_tokens for one in every] == [
        lengths[(first + row) % len(lengths)] for row in range(prompts * samples)
    ]
    assert all(one.min_tokens == one.max_tokens and not one.stop and not one.lengths for one in every)
    order = torch.arange(len(axis)).flip(0)
    assert sampling.of_rows(axis.take(order).keys) == every[::-1]


def test_rows_without_a_list_end_by_themselves():
    assert Sampling(2, 16).of_rows(Axis.fresh(2).repeat(2).keys) == [Sampling(2, 16)] * 4
