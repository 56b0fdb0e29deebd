"""`rlflow eval` reports the numbers that a run measured itself, at every checkpoint. If it cannot evaluate,
it gives the reason."""

import json
import shutil
from pathlib import Path

import pytest
from keyed import keyed
from run_faults import MODEL, write_sums

import rlflow
from rlflow import PlanError
from rlflow.cli.eval import table
from rlflow.cli.main import run_command
from rlflow.config.roles.prompt_room import positions_of
from rlflow.monitoring.recorded import recorded
from rlflow.monitoring.reporter import Quiet
from rlflow.runs.evaluate import shown
from rlflow.runs.evaluating import Answering, evaluate_folder, evaluate_run, with_rewards, without_sets
from rlflow.runs.resume import fork, resume

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

JUDGES = '''
def even(completion):
    """Whether the number said is even: the small model is right too seldom for figures that tell anything apart."""
    said = "".join(letter for letter in completion if letter.isdigit())
    return {"score": float(bool(said) and int(said) % 2 == 0), "pred": said[:1]}

def short(completion):
    return 1.0 if len(completion) < 3 else 0.25
'''
SMALL = ("--eval", "x=WHERE/small.jsonl", "--data.x.prompt", "ask")


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    """A run of three iterations, evaluated before the first and after each of them, and saved each time."""
    where = tmp_path_factory.mktemp("ground")
    write_sums(where / "sums.jsonl")
    small = "".join(json.dumps({"ask": f"{n} + {n + 1} ="}) + "\n" for n in range(7))
    (where / "small.jsonl").write_text(small)
    (where / "judges.py").write_text(JUDGES)
    rlflow.run("grpo", name="run", **settings(where))
    return where


def settings(where, **more):
    return {
        "model": MODEL,
        "data": str(where / "sums.jsonl"),
        "prompts": 4,
        "iterations": 3,
        "eval_every": 1,
        "save_every": 1,
        "keep": 5,
        "threads": 1,
        "held_out": 4,
        "hp.max_tokens": 4,
        "lr": 1e-3,
        "out": str(where),
        "eval": [f"small={where}/small.jsonl"],
        "eval_samples": 4,
        "reward": ["task", f"{where}/judges.py:even@small"],
        "data.small.prompt": "ask",
        **more,
    }


def own(folder, iteration):
    """Return the figures of a run's own evaluation."""
    return dict(dict(recorded(folder).history.evaluations)[iteration])


def answers(folder, iteration):
    return (folder / "evaluations" / f"after-00000{iteration}.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [None, 1])
def test_eval_reproduces_the_numbers_and_answers_of_a_run(ground, tmp_path, checkpoint):
    evaluated = evaluate_run(ground / "run", {}, tmp_path / "out", Quiet(), checkpoint)
    assert evaluated.iteration == (checkpoint or 3)
    assert keyed(shown(evaluated.accuracy)) == own(ground / "run", evaluated.iteration)
    assert (evaluated.folder / "answers.jsonl").read_text() == answers(ground / "run", evaluated.iteration)
    content = json.loads((evaluated.folder / "evaluation.json").read_text())
    assert content["evaluation"] == own(ground / "run", evaluated.iteration)
    assert 0 < content["evaluation"]["evaluation/small/sampled"] < 1


def test_eval_of_a_model_folder_equals_its_run(ground, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "eval",
        str(ground / "run/final/actor"),
        "--eval",
        f"small={ground}/small.jsonl",
        "--data.small.prompt",
        "ask",
        "--eval-samples",
        "4",
        "--reward",
        f"{ground}/judges.py:even",
        "--max-tokens",
        "4",
        "--threads",
        "1",
        "--json",
    ]
    assert run_command(words) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["evaluation"] == {
        name: value for name, value in own(ground / "run", 3).items() if "small" in name
    }
    kept = [line for line in answers(ground / "run", 3).splitlines() if json.loads(line)["set"] == "small"]
    assert (tmp_path / "evaluations/actor-1/answers.jsonl").read_text().splitlines() == kept
    assert run_command([*words[:-1], "--quiet"]) == 0
    assert "small pass@4" in capsys.readouterr().out


@pytest.mark.slow
def test_a_reward_without_a_set_scores_all_sets_without_a_reward(ground, tmp_path):
    """This also holds for sets with answers, which the packaged scorer could score."""
    (tmp_path / "judges.py").write_text(
        "def all(completion):\n    return 1.0\n\ndef none(completion):\n    return 0.0\n"
    )
    judges = tmp_path / "judges.py"
    values = {
        "eval": (f"one={ground}/sums.jsonl", f"two={ground}/sums.jsonl"),
        "reward": (f"{judges}:all", f"{judges}:none@two"),
        "threads": "1",
        "hp.max_tokens": "2",
    }
    sets = evaluate_folder(Path(MODEL), values, tmp_path, Quiet()).accuracy.sets
    assert [sets[name]["greedy"] for name in ("one", "two")] == [1.0, 0.0]


def test_a_run_is_evaluated_on_other_sets_with_other_rewards(ground, tmp_path):
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "2 + 2 =", "answer": "4"}) + "\n")
    evaluated = evaluate_run(
        ground / "run",
        {"eval": (f"other={tmp_path}/other.jsonl",), "reward": (f"{ground}/judges.py:short",)},
        tmp_path,
        Quiet(),
    )
    figures = keyed(shown(evaluated.accuracy))
    assert {name.split("/")[1] for name in figures} == {"other"}
    assert figures["evaluation/other/prompts"] == 1
    assert figures["evaluation/other/mean@4"] >= 0.25
    assert "evaluation/other/maj@4" not in figures  # the reward gives no answers


def test_rewards_of_an_evaluation_score_only_its_sets():
    saved = {"reward": ["math", "a.py:f@old"], "eval": ["old=x"]}
    assert with_rewards(saved, {}) == {}
    assert with_rewards(saved, {"reward": ("task",)})["reward"] == ("math", "task@old")
    other = {"reward": ("task", "b.py:g@two"), "eval": ("one=x", "two=y")}
    assert with_rewards(without_sets(saved, ["one", "two"]), other)["reward"] == (
        "math",
        "b.py:g@two",
        "task@one",
    )
    assert without_sets({**saved, "data.old.prompt": "ask", "data.prompt": "q"}, ["one"]) == {
        "reward": ["math"],
        "eval": ["old=x"],
        "data.prompt": "q",
    }


@pytest.mark.slow
def test_a_resumed_run_has_the_same_answers(ground, tmp_path):
    cut = rlflow.run("grpo", **settings(ground, name="cut", iterations=1)).folder
    (cut / "evaluations/.writing-1-1-0-after-000002.jsonl-1").touch()  # left by a killed process
    resume(cut, {"iterations": "3"}, Quiet())
    assert sorted(path.name for path in (cut / "evaluations").iterdir()) == [
        f"after-00000{n}.jsonl" for n in range(4)
    ]
    for number in range(4):
        assert (own(cut, number), answers(cut, number)) == (
            own(ground / "run", number),
            answers(ground / "run", number),
        )
    forked = fork(cut, {"iterations": "4", "eval_samples": "2", "name": "fork"}, Quiet())
    assert {"evaluation/small/pass@2", "evaluation/small/prompts"} < own(forked.folder, 3).keys()
    assert own(forked.folder, 3)["evaluation/small/greedy"] == own(cut, 3)["evaluation/small/greedy"]


def test_the_evaluation_sets_are_part_of_the_run_identity(ground, tmp_path):
    cut = rlflow.run("grpo", **settings(ground, name="changed", iterations=1)).folder
    before = (ground / "small.jsonl").read_text()
    try:
        (ground / "small.jsonl").write_text(before + '{"ask": "9 + 9 ="}\n')
        with pytest.raises(PlanError, match="depends on has changed") as error:
            resume(cut, {"iterations": "2"}, Quiet())
    finally:
        (ground / "small.jsonl").write_text(before)
    assert "held-out set small: records" in str(error.value)


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (["eval", "gone"], "there is no run 'gone'", "rlflow runs"),
        (["eval", "RUN", "--checkpoint", "9"], "no checkpoint after 9", "--checkpoint 3"),
        (["eval", "MODEL"], "no prompts to evaluate the model on", "--eval NAME=FILE"),
        (["eval", "MODEL", "--eval", "x=WHERE/gone.jsonl"], "no such data: .*gone.jsonl", ""),
        (["eval", "MODEL", "--eval", "WHERE/small.jsonl"], "has no name", "--eval small="),
        (["eval", "MODEL", "--eval", "x=WHERE/small.jsonl"], "prompt", "--data.prompt FIELD"),
        (["eval", "MODEL", *SMALL], "no reward can score the held-out set 'x'", "--reward REWARD@x"),
        (["eval", "MODEL", *SMALL, "--reward", "math"], "reads 'answer'", "--data.x.answer"),
        (
            ["eval", "MODEL", "--eval", "x=WHERE/small.jsonl", "--checkpoint", "1"],
            "has no checkpoints",
            "name the run",
        ),
        (
            ["eval", "MODEL", "--eval", "x=WHERE/sums.jsonl", "--backend", "null"],
            "no prompts to evaluate on",
            "--eval",
        ),
    ],
)
def test_an_impossible_evaluation_names_a_remedy_and_leaves_no_file(
    ground, tmp_path, monkeypatch, words, message, remedy
):
    monkeypatch.chdir(tmp_path)
    places = {"RUN": str(ground / "run"), "MODEL": MODEL, "WHERE": str(ground)}
    with pytest.raises(PlanError, match=message) as error:
        run_command([places.get(word, word.replace("WHERE", str(ground))) for word in words])
    assert remedy in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_checkpoints_cannot_be_evaluated(ground, tmp_path):
    folder = Path(shutil.copytree(ground / "run", tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(PlanError, match="has no checkpoint"):
        evaluate_run(folder, {}, tmp_path, Quiet())


def test_a_folder_is_evaluated_from_python(ground, tmp_path):
    evaluated = evaluate_folder(
        Path(MODEL), {"eval": (f"sums={ground}/sums.jsonl",), "threads": "1"}, tmp_path, Quiet()
    )
    assert (evaluated.iteration, evaluated.accuracy.sampled) == (None, None)
    assert evaluated.accuracy.sets["sums"]["prompts"] == 24
    tokens = json.loads((evaluated.folder / "evaluation.json").read_text())["settings"]["hp.max_tokens"]
    assert tokens == positions_of(Path(MODEL)) // 2 < Answering().max_tokens
    assert [str(cell) for cell in table(evaluated).columns[0].cells][:2] == ["sums sampled", "sums greedy"]


@pytest.mark.slow
def test_adapters_have_the_same_numbers_from_a_checkpoint(ground, tmp_path):
    folder = rlflow.run("grpo", **settings(ground, name="adapters", lora=4, iterations=2)).folder
    evaluated = evaluate_run(folder, {}, tmp_path, Quiet())
    assert keyed(shown(evaluated.accuracy)) == own(folder, 2)
    assert (evaluated.folder / "answers.jsonl").read_text() == answers(folder, 2)


@pytest.mark.slow
def test_evaluation_of_runs_and_folders_uses_the_environment(tmp_path):
    write_sums(tmp_path / "sums.jsonl")
    (tmp_path / "again.py").write_text(
        "from rlflow import Turn\n\nclass Again:\n"
        "    def step(self, said):\n        return Turn(says=' again ')\n"
    )
    env = {"env": f"{tmp_path}/again.py:Again", "env.turns": 2}
    data = {"data": str(tmp_path / "sums.jsonl"), "held_out": 4}
    rlflow.run(
        "grpo",
        name="acts",
        model=MODEL,
        prompts=4,
        iterations=1,
        threads=1,
        out=str(tmp_path),
        **data,
        **env,
        **{"hp.max_tokens": 12},
    )
    again = evaluate_run(tmp_path / "acts", {}, tmp_path / "figures", Quiet())
    assert keyed(shown(again.accuracy)) == own(tmp_path / "acts", 1)
    values = {"eval": (f"sums={tmp_path}/sums.jsonl",), "hp.max_tokens": 12}
    acted = evaluate_folder(Path(MODEL), {**values, **env}, tmp_path / "figures", Quiet())
    alone = evaluate_folder(Path(MODEL), values, tmp_path / "figures", Quiet())
    said = [
        (each.folder / "answers.jsonl").read_text().count(" again ") > 0 for each in (again, acted, alone)
    ]
    assert said == [True, True, False]
