"""Records unfit for the model: reported with their lines before a run, or dropped, counted and reported once;
never fatal later."""

import json

import pytest
from sources import ROOT

import rlflow
from rlflow.author.load import load_flow
from rlflow.checkpoints.reading import load_latest
from rlflow.compiler.trace.compile import compile_flow
from rlflow.config.options import Options
from rlflow.data import open_data
from rlflow.errors import PlanError
from rlflow.monitoring.reporter import Quiet
from rlflow.runs import guards, resume


class Notes(Quiet):
    """A reporter that keeps a run's notes."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def poisoned(task, tmp_path):
    """24 questions; the one in line 10 is empty, and the one in line 17 is longer than the model accepts."""
    rows = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(24)]
    rows[9]["prompt"], rows[16]["prompt"] = "", "1 + " * 200 + "1 ="
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        **task,
        "data": str(path),
        "held_out": 0,
        "hp.samples": 2,
        "hp.max_tokens": 4,
        "hp.minibatch": 16,
        "save_every": 0,
    }


@pytest.fixture
def without_models(poisoned):
    """The same on the null backend, whose models accept any length: only the empty record is bad."""
    return {name: value for name, value in poisoned.items() if name not in ("model", "lr")} | {
        "backend": "null"
    }


@pytest.fixture
def unchecked(monkeypatch):
    """Skip the check of the data before the run, as for data with too many records."""
    monkeypatch.setattr(guards, "SECONDS", -1.0)


def notes(folder):
    """Return the notes of a run, without times."""
    file = folder / "notes.txt"
    return [line.partition("  ")[2] for line in file.read_text().splitlines()] if file.exists() else []


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_bad_records_stop_a_run_before_it_begins(poisoned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError) as caught:
        rlflow.run("grpo", **{**poisoned, "data": "sums.jsonl"})
    page = (ROOT / "docs" / "models.md").read_text()
    assert f"```\n{caught.value}\n```\n" in page
    assert not (tmp_path / "runs").exists()


def test_an_impossible_end_token_stops_a_run_before_it_begins(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        PlanError, match=r"(?s)has stop tokens that the model in \S+ does not have.*stop_token_ids 9999"
    ):
        rlflow.run("grpo", **task, **{"actor.generate.stop_token_ids": [9999]})
    assert not (tmp_path / "runs").exists()


def test_bad_records_are_dropped_on_request(poisoned):
    heard = Notes()
    given, hp = rlflow.runs.api.resolve_config(
        rlflow.author.load.load_flow("grpo"), None, {**poisoned, "bad_records": "skip"}
    )
    prepared = rlflow.runs.prepare.prepare(rlflow.author.load.load_flow("grpo"), hp, given, heard.note)
    try:
        drawn = prepared.prompts.take(44)
    finally:
        prepared.close()
    assert [note for note in heard.notes if "skipped" in note] == [
        (
            f"skipped 2 of 24 records of {poisoned['data']}: 1 without a prompt ({poisoned['data']}:10); "
            f"1 too long, the longest of 402 tokens ({poisoned['data']}:17)"
        )
    ]
    assert sorted(drawn["prompt"]) == sorted(2 * [f"{a} + 1 =" for a in range(24) if a not in (9, 16)])


def test_bad_held_out_records_are_reported_and_dropped(without_models):
    stopped = {**without_models, "held_out": 16}
    with pytest.raises(PlanError, match="1 of 24 records"):
        rlflow.run("grpo", **stopped)
    assert rlflow.run("grpo", **stopped, bad_records="skip").iterations == 2


@pytest.mark.usefixtures("unchecked")
def test_a_bad_record_found_later_is_dropped_and_reported_once(without_models):
    result = rlflow.run("grpo", **{**without_models, "iterations": 6})
    assert result.iterations == 6
    counted = [line.get("data/left_out_empty", 0.0) for line in lines(result.folder)]
    assert sum(counted) == 2.0  # 48 rows are two epochs of 23 good records, and two more
    assert set(counted) == {0.0, 1.0}
    assert [note for note in notes(result.folder) if "skipped" in note] == [
        (
            "checked 0 of 24 training records in 0 s; the others are checked when they are drawn, and skipped if "
            "they cannot be used"
        ),
        f"iteration {counted.index(1.0)}: {without_models['data']}:10 is skipped: its prompt is empty",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_a_run_with_bad_records_resumes_to_the_same_end(without_models, monkeypatch):
    straight = rlflow.run("grpo", **{**without_models, "iterations": 6}, name="straight").folder
    cuts = {
        cut: rlflow.run("grpo", **{**without_models, "iterations": cut}, name=f"cut-{cut}").folder
        for cut in (1, 2, 4)
    }
    monkeypatch.setattr(guards, "SECONDS", 60.0)  # now the check finds the record, and must not stop the run
    for cut, folder in cuts.items():
        heard = Notes()
        resume.resume(folder, {"iterations": 6}, heard)
        assert "1 of 24 records" in next(note for note in heard.notes if "skipped" in note), cut
        assert [timeless(line) for line in lines(folder)] == [timeless(line) for line in lines(straight)], cut
        assert (
            load_latest(folder).snapshot.state["prompts"] == load_latest(straight).snapshot.state["prompts"]
        ), cut


def timeless(line):
    return {
        name: value for name, value in line.items() if "second" not in name and not name.startswith("time")
    }


def test_good_data_are_not_reported(task):
    del task["model"], task["lr"]
    result = rlflow.run("grpo", **task, backend="null", **{"hp.max_tokens": 4})
    assert not any("skipped" in note or "checked" in note for note in notes(result.folder))
    assert not any(name.startswith("data/") for line in lines(result.folder) for name in line)


@pytest.mark.parametrize("rejected", ["ab", "aa"])
def test_pairs_of_equal_responses_are_reported(rejected, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "p", "chosen": "a", "rejected": other}) + "\n" for other in rejected)
    )
    data, flow = open_data(path), load_flow("dpo")
    graph, heard = compile_flow(flow, flow.parameters.hp).graph, []
    arguments = (data, graph, {}, Options(held_out=0), heard.append)
    if rejected == "ab":
        guards.screen_records(*arguments)
    else:
        with pytest.raises(PlanError, match="all 2 pairs of"):
            guards.screen_records(*arguments)
        guards.screen_records(*arguments, begun=True)
    assert ["have the same ids in both responses" in note for note in heard] == [True]
