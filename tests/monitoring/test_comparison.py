"""`rlflow compare`: differing settings, curves, a table, and a verdict that the runs support."""

import json
import shutil

import pytest

from rlflow.cli.compare import graph_differences
from rlflow.monitoring.comparison import area, arms_of, cautions, compared, verdict
from rlflow.monitoring.recorded import recorded


def comparison(*folders, metrics=()):
    return compared([recorded(folder) for folder in folders], metrics, {})


def arm(written, label, ends, **settings):
    return [
        written(f"{label}{seed}", seed=seed, evaluations=((0, 0.0), (1, end)), **settings)
        for seed, end in enumerate(ends)
    ]


def test_runs_with_equal_settings_form_one_arm(written):
    runs = [
        written("a", seed=0),
        written("b", seed=1),
        written("c", hp={"samples": 16}),
        written("d", seed=0, out="else"),
    ]
    arms = arms_of([recorded(folder) for folder in runs])
    assert [(arm.label, [run.name for run in arm.runs], arm.seeds) for arm in arms] == [
        ("A", ["a", "b", "d"], 2),
        ("B", ["c"], 1),
    ]


def test_only_settings_that_differ_are_printed(called, written):
    written("one", evaluations=((0, 0.25), (1, 0.5)))
    written("two", hp={"samples": 16}, evaluations=((0, 0.25), (1, 0.75)))
    code, out, err = called("compare", "one", "two")
    assert (code, err) == (0, "")
    assert ["hp.samples", "8", "16"] in [line.split() for line in out.splitlines()]
    assert "actor.lr" not in out
    assert "graph of" not in out
    assert out.splitlines()[-1] == "not enough to rank: one run each"
    assert [line.split()[1:] for line in out.splitlines() if line.startswith(("A  one", "B  two"))] == [
        ["one", "done", "0.5", "0.5", "0.375", "2.0", "100", "24"],
        ["two", "done", "0.75", "0.75", "0.5", "2.0", "100", "24"],
    ]
    assert max(map(len, out.splitlines())) <= 100
    assert "\x1b" not in out


def test_the_mean_over_seeds_is_drawn_with_its_range(called, written):
    arm(written, "a", (0.2, 0.4))
    arm(written, "b", (0.6,), prompts=8)
    code, out, _ = called("compare", "a0", "a1", "b0")
    assert code == 0
    assert "evaluation/sampled after iterations, means over seeds" in out
    rows = [line.split()[1:5] for line in out.splitlines() if line.startswith("A  ")]
    assert rows[-2:] == [["mean", "0.3", "0.3", "0.15"], ["range", "0.2", "…", "0.4"]]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("B  ")].count("mean") == 0, (
        "one run has no mean"
    )
    assert out.splitlines()[-1] == "not enough to rank: A has 2 seeds, B has 1 seed; each needs at least 5"


def test_json_has_the_printed_content(called, written):
    arm(written, "a", (0.25, 0.5))
    arm(written, "b", (0.75,), prompts=8)
    code, out, _ = called("compare", "a0", "a1", "b0", "--metric", "own/number", "--json")
    values = json.loads(out)
    assert code == 0
    assert values["settings"] == {"prompts": {"A": "4", "B": "8"}}
    assert [(run["arm"], run["seed"], run["iterations"], run["state"]) for run in values["runs"]] == [
        ("A", 0, 1, "done"),
        ("A", 1, 1, "done"),
        ("B", 0, 1, "done"),
    ]
    assert values["runs"][1]["metrics"]["evaluation/sampled"] == {
        "curve": [[0, 0.0], [1, 0.5]],
        "last": 0.5,
        "best": 0.5,
        "area": 0.25,
        "seconds": 2.0,
        "tokens": 100,
        "rows trained": 24,
    }
    # the metric does not state if higher is better
    assert values["runs"][0]["metrics"]["own/number"]["best"] is None
    assert values["verdict"].startswith("not enough to rank")


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ((0.1, 0.2, 0.3, 0.4, 0.5), None, "all 5 runs have the same settings: there is nothing to rank"),
        ((0.1,), (0.9,), "not enough to rank: one run each"),
        ((0.1,) * 5, (0.9,) * 4, "not enough to rank: A has 5 seeds, B has 4 seeds; each needs at least 5"),
        (
            (0.1, 0.2, 0.3, 0.4, 0.5),
            (0.6, 0.7, 0.8, 0.9, 1.0),
            "do not overlap; that is not a statistical test",
        ),
        (
            (0.1, 0.2, 0.3, 0.4, 0.6),
            (0.6, 0.7, 0.8, 0.9, 1.0),
            "sampled overlap; that is not a statistical test",
        ),
    ],
)
def test_the_verdict_claims_no_more_than_the_seeds_support(written, first, second, says):
    folders = arm(written, "a", first) + (arm(written, "b", second, prompts=8) if second else [])
    assert verdict(comparison(*folders)).endswith(says)


def test_the_same_seed_counts_once(written):
    folders = [written(f"a{i}", seed=0, evaluations=((0, 0.5),)) for i in range(5)]
    folders += [written(f"b{i}", seed=i, prompts=8, evaluations=((0, 0.5),)) for i in range(5)]
    assert verdict(comparison(*folders)).startswith("not enough to rank: A has 1 seed, B has 5 seeds")


def test_reasons_that_limit_a_comparison_are_shown(written):
    folders = [written("one", held_out=64), written("two", rewards=(0.1, 0.2), held_out=128, state="failed")]
    assert cautions(comparison(*folders)) == [
        "held_out differ: the evaluations may use other prompts, or start from other weights",
        "not finished: two",
        "the last values are after different numbers of iterations: A 1, B 2",
    ]
    assert cautions(comparison(folders[0], written("three", held_out=64, prompts=9))) == []


def test_a_run_without_the_metric_is_named_and_has_no_numbers(called, written):
    written("one", evaluations=((0, 0.25), (1, 0.5)))
    written("two", prompts=8)
    out = called("compare", "one", "two")[1]
    assert "without this metric: B" in out
    assert next(line.split() for line in out.splitlines() if line.startswith("B  two")) == [
        "B",
        "two",
        "done",
        "2.0",
        "100",
        "24",
    ]


def test_without_evaluations_the_mean_reward_is_compared(written):
    assert comparison(written("one"), written("two")).metrics == ("reward/mean",)


def test_each_of_several_rewards_is_drawn_and_one_is_ranked(called, judged):
    judged("one", 0.25, rewards=(0.5,))
    judged("two", 0.125, rewards=(0.75,), prompts=8)
    for words, named, last in (
        ((), "reward/mean", "0.5"),
        (("--metric", "seconds", "--metric", "style/mean"), "style/mean", "0.25"),
    ):
        out = called("compare", "one", "two", *words)[1]
        assert [f"{name}/mean after iterations" in out for name in ("reward", "style")] == [True, True]
        assert f"last, best and area of {named}\n" in out
        assert next(line.split()[3] for line in out.splitlines() if line.startswith("A  one")) == last
    runs = [
        judged(f"{name}{seed}", seed, seed=seed, prompts=prompts)
        for name, prompts in (("a", 4), ("b", 8))
        for seed in range(5)
    ]
    assert verdict(comparison(*runs, metrics=["style/mean"])) == (
        "the ranges of the last style/mean overlap; that is not a statistical test"
    )


def test_several_rewards_do_not_hide_held_out_accuracy(judged):
    runs = [judged(name, 0.5, evaluations=((1, 0.5),)) for name in ("one", "two")]
    assert comparison(*runs, metrics=["style/mean"]).metrics == ("evaluation/sampled", "style/mean")


def test_a_difference_of_graphs_is_named_without_settings(tmp_path, finished, called):
    import rlflow

    base = shutil.copytree(finished, tmp_path / "runs")
    small = {"backend": "null", "iterations": 1, "prompts": 4, "hp.max_tokens": 4}
    rlflow.run("grpo", out=str(base), **small)
    rlflow.run("ppo", out=str(base), **small, **{"hp.samples": 2})
    runs = [recorded(base / name) for name in ("ppo-1", "ppo-2", "grpo-1")]
    assert [(name, lines[0]) for name, lines in graph_differences(runs).items()] == [
        (
            "grpo-1",
            (
                "- reference.logprobs: (prompts.prompt_tokens, actor.generate.tokens, "
                "actor.generate.temperature) -> ref_logprobs"
            ),
        )
    ]
    (base / "grpo-1" / "graph.msgpack").write_bytes(b"damaged")
    out = called("compare", "ppo-1", "grpo-1")[1]
    assert "graph of grpo-1, compared with ppo-1:\n  unknown: " in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["one"], ["needs at least two runs", "rlflow show RUN"]),
        (["one", "runs/one"], ["needs at least two runs"]),
        (["one", "twoo"], ["there is no run 'twoo'", "nearest:  two"]),
        (["one", "other"], ["'other' is not the folder of a run"]),
        (
            ["one", "two", "--metric", "own/nummer"],
            ["none of the runs has the metric 'own/nummer'", "nearest:  own/number"],
        ),
        ([], ["Missing argument"]),
    ],
)
def test_an_impossible_comparison_is_refused(called, written, words, says):
    written("one")
    written("two").parent.parent.joinpath("other").mkdir()
    code, out, err = called("compare", *words)
    assert (code, out) == (2, "")
    assert [part for part in says if part not in err] == []


def test_the_area_is_the_mean_height():
    assert area([(0, 0.0), (10, 1.0), (20, 1.0)]) == 0.75
    assert area([(4, 0.5)]) == 0.5


def test_seeds_of_unequal_length_are_reported(written):
    longer = {"seed": 1, "rewards": (0.1, 0.2)}
    folders = [
        written("one"),
        written("two", **longer),
        written("three", prompts=9),
        written("four", prompts=9, **longer),
    ]
    assert any("after different numbers of iterations" in said for said in cautions(comparison(*folders)))
