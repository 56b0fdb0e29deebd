"""Runs on several data sources: rewards and numbers by source, and an unnoticeable resume."""

import json

import pytest

import rlflow
from rlflow import PlanError
from rlflow.monitoring.reporter import Quiet
from rlflow.runs.resume import resume

JUDGES = """
def length(completion):
    return float(len(completion))

def right(completion, result):
    return 1000.0

def label(completion, answer, hint=None):
    return 0.0 if hint is None else 5.0
"""


@pytest.fixture
def ground(tmp_path):
    """Two files with different field names, and rewards."""
    for name, prompt, answer, count in (("sums", "prompt", "answer", 30), ("other", "ask", "result", 14)):
        rows = [
            {prompt: f"{name} {n}", answer: str(n), **({"hint": "h"} if name == "other" else {})}
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judges.py").write_text(JUDGES)
    return tmp_path


def settings(ground, **more):
    return {
        "backend": "null",
        "prompts": 10,
        "iterations": 3,
        "held_out": 0,
        "hp.max_tokens": 4,
        "out": str(ground / "runs"),
        "threads": 1,
        "data": [f"sums={ground}/sums.jsonl:0.7", f"{ground}/other.jsonl:0.3"],
        "data.other.prompt": "ask",
        "reward": [f"{ground}/judges.py:length@sums", f"{ground}/judges.py:right@other:0.5"],
        **more,
    }


def lines(folder, name="metrics.jsonl"):
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{name: value for name, value in row.items() if "second" not in name} for row in rows]


@pytest.mark.slow
def test_each_source_has_its_own_rewards_fields_and_numbers(
    ground,
):
    whole = rlflow.run("grpo", **settings(ground, name="whole")).folder
    cut = rlflow.run("grpo", **settings(ground, name="cut", iterations=1)).folder
    resume(cut, {"iterations": "3"}, Quiet())
    assert lines(cut) == lines(whole)
    assert lines(cut, "samples.jsonl") == lines(whole, "samples.jsonl")
    for row in lines(whole):
        assert row["scores/other"] == 500.0
        assert row["scores/sums"] < 100.0
        assert row["reward/mean"] == pytest.approx(0.7 * row["scores/sums"] + 0.3 * row["scores/other"])


@pytest.mark.slow
def test_sources_on_pools_equal_sources_in_one_process(ground):
    alone = rlflow.run("grpo", **settings(ground, name="alone")).folder
    pooled = rlflow.run(
        "grpo", **settings(ground, name="pooled", iterations=1, pools="train=2@threads,rollout=1@threads")
    ).folder
    resume(pooled, {"iterations": "3"}, Quiet())
    assert lines(pooled, "samples.jsonl") == lines(alone, "samples.jsonl")
    for found, wanted in zip(lines(pooled), lines(alone), strict=True):
        names = [name for name in wanted if name.startswith(("scores/", "reward/", "data/"))]
        assert {"scores/sums", "scores/other", "reward/mean"} <= set(names)
        assert {name: found[name] for name in names} == pytest.approx(
            {name: wanted[name] for name in names}, rel=1e-12
        )


def test_a_resumed_run_finds_its_files_from_another_folder(ground, monkeypatch):
    monkeypatch.chdir(ground)
    paths = {
        "data": ["sums=sums.jsonl:0.7", "other.jsonl:0.3"],
        "reward": ["judges.py:length@sums", "judges.py:length@other"],
    }
    folder = rlflow.run("grpo", **settings(ground, iterations=1, **paths)).folder
    monkeypatch.chdir("/")
    assert resume(folder, {"iterations": "2"}, Quiet()).last["scores/sums"] > 0


def test_rewards_of_a_source_add_to_the_shared_rewards(ground):
    rewards = [f"{ground}/judges.py:label", f"{ground}/judges.py:right@other:0.01"]
    last = rlflow.run(
        "grpo", **settings(ground, reward=rewards, iterations=1, **{"data.other.answer": "result"})
    ).last
    assert (last["scores/sums"], last["scores/other"]) == (0.0, 15.0)
    assert (last["reward/label_mean"], last["reward/right_mean"]) == (5.0, 1000.0)


def test_a_missing_field_of_a_source_is_named_with_a_remedy(ground):
    reward = {"reward": [f"{ground}/judges.py:right"], "iterations": 1}
    with pytest.raises(
        PlanError, match="the reward 'right' reads 'result', which the source 'sums' does not have"
    ) as error:
        rlflow.run("grpo", **settings(ground, **reward))
    assert "--data.sums.result FIELD" in error.value.problems[0].remedy
    assert (
        rlflow.run("grpo", **settings(ground, **reward, **{"data.sums.result": "answer"})).last["scores/sums"]
        == 1000.0
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": ["judges.py:length@sum"]}, "'length@sum' names an unknown source of the data"),
        ({"reward": ["judges.py:length@sums"]}, "the source 'other' has no reward"),
        ({"data.othr.prompt": "ask"}, "'--data.othr.prompt' names no source"),
        ({"data.other.chat": "true"}, "'chat' is the same for all sources"),
        ({"data": ["sums.jsonl:1", "other.jsonl"]}, "the source 'other' has no weight"),
    ],
)
def test_settings_that_do_not_fit_the_sources_are_refused_early(ground, monkeypatch, change, words):
    monkeypatch.chdir(ground)
    with pytest.raises(PlanError, match=words):
        rlflow.run("grpo", **settings(ground, **change))


def test_one_source_may_have_a_name_and_a_reward_of_that_name(ground):
    one = settings(ground, data=f"s={ground}/sums.jsonl", reward=f"{ground}/judges.py:length@s", iterations=1)
    del one["data.other.prompt"]
    last = rlflow.run("grpo", **one).last
    assert last["reward/mean"] > 0
    assert not any(name.startswith("scores/") for name in last)


def test_the_run_reports_the_share_of_each_source(ground):
    from rlflow.author.load import load_flow
    from rlflow.config.flags import flat
    from rlflow.runs.api import resolve_config
    from rlflow.runs.prepare import prepare

    notes = []
    flow = load_flow("grpo")
    config, hp = resolve_config(
        flow, None, flat(settings(ground, data=[f"{ground}/sums.jsonl", f"{ground}/other.jsonl"], prompts=88))
    )
    prepare(flow, hp, config, notes.append).close()
    assert notes == [
        "source sums: 68.2% of the prompts, from 30 records (--data NAME=FILE:WEIGHT sets another share)",
        "sums has 30 records to train on, and an iteration takes 60: each record appears about 2 times per iteration (--prompts)",
        "source other: 31.8% of the prompts, from 14 records (--data NAME=FILE:WEIGHT sets another share)",
        "other has 14 records to train on, and an iteration takes 28: each record appears about 2 times per iteration (--prompts)",
    ]


@pytest.mark.slow
def test_the_held_out_accuracy_is_reported_by_source(task, ground):
    from run_faults import content, differences

    keywords = {
        **task,
        "data": [f"a={task['data']}:1", f"b={ground}/other.jsonl:1"],
        "data.b.prompt": "ask",
        "data.b.answer": "result",
        "reward": ["task"],
        "hp.samples": 2,
        "hp.max_tokens": 4,
        "hp.minibatch": 8,
        "iterations": 3,
        "eval_every": 1,
    }
    whole = rlflow.run("grpo", **keywords, name="whole")
    resume(
        rlflow.run("grpo", **{**keywords, "iterations": 1}, name="cut").folder, {"iterations": "3"}, Quiet()
    )
    assert list(differences(content(whole.folder), content(whole.folder.parent / "cut"))) == []
    assert set(whole.after.sources) == {"sampled/a", "sampled/b", "greedy/a", "greedy/b"}
    judged = next(row for row in lines(whole.folder) if "evaluation/sampled" in row)
    counts = {"a": 8, "b": 2}
    assert judged["evaluation/sampled"] == pytest.approx(
        sum(judged[f"evaluation/sampled/{n}"] * c for n, c in counts.items()) / 10
    )
