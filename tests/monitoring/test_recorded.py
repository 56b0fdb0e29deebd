"""The reader of a run's folder, in any state of the folder."""

import pytest

from rlflow.monitoring.recorded import Costs, as_text, differing, recorded


def test_settings_are_named_by_flags_without_bookkeeping(written):
    settings = recorded(written("one", prompts=6, out="elsewhere", track=["wandb"])).settings
    assert settings == {
        "flow": "grpo",
        "graph": "g1",
        "hp.samples": 8,
        "actor.lr": "1e-4",
        "seed": 0,
        "prompts": 6,
        "iterations": 1,
    }


def test_curves_count_finished_iterations_and_a_repeated_line_counts_once(written):
    folder = written("one", rewards=(0.25, 0.5), evaluations=((0, 0.1), (2, 0.3)))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 1, "reward/mean": 0.75, "seconds": 4.0}\n')
    run = recorded(folder)
    assert run.curve("reward/mean") == [(1, 0.25), (2, 0.75)]
    assert run.curve("evaluation/sampled") == [(0, 0.1), (2, 0.3)]
    assert run.curve("unknown") == []
    assert {"evaluation/greedy", "own/number", "seconds"} <= set(run.metrics)
    assert run.costs == Costs(seconds=6.0, sampled=64, tokens=200, trained=48)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]\n",
        '{"sampled": 3, "fates": {}, "iteration": 0}\n',
        '{"fates": [1, {"fate": "trained"}]}\n',
        "[" * 100_000 + "\n",
        '{"iteration": {}, "fates": [{"fate": "trained", "rows": 1}]}\n',
        '{"iteration": 0, "fates": [{"fate": "trained", "rows": 1e999}]}\n',
    ],
    ids=lambda text: text[:60],
)
def test_the_readable_part_of_damaged_accounting_is_read(written, text):
    folder = written("one")
    (folder / "fates.jsonl").write_text(text)
    assert not recorded(folder).costs.trained


def test_an_empty_folder_reads_as_empty(tmp_path):
    run = recorded(tmp_path)
    assert (run.settings, run.metrics, run.costs) == ({}, [], Costs())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1e-4", "0.0001"),
        (0.0001, "0.0001"),
        ("8", "8"),
        (8, "8"),
        (8.0, "8"),
        (True, "true"),
        ("true", "true"),
        (None, "none"),
        (["a", 2], "a,2"),
        (123456789, "123456789"),
        (0.123456789, "0.123456789"),
        ("a file.py", "a file.py"),
        ({"a": 1}, '{"a": 1}'),
    ],
)
def test_a_setting_reads_like_its_flag(value, text):
    assert as_text(value) == text


def test_only_settings_that_differ_are_named():
    assert differing([{"a": 1, "b": 2}, {"a": "1", "b": 3}, {"a": 1.0}]) == {"b": ["2", "3", "-"]}
