"""Outcomes of sampled rows, in words and as metrics. Both read the row accounting."""

import json

import pytest
from keyed import keyed

from rlflow.execution.account import Count, End, RowAccount, RowOutcome
from rlflow.runs.outcomes import outcome_metrics, outcomes_text, run_account


def account():
    made = RowAccount()
    made.sample("actor.generate", Count(2, 8, 80))
    made.sample("repeat.chosen", Count(4, 4, 0))
    made.end("actor.generate", End(RowOutcome.TRAINED, "actor.update"), Count(2, 5, 50))
    made.end("actor.generate", End(RowOutcome.LEFT_OUT, "choose", "not chosen", "count=1"), Count(2, 3, 30))
    made.end("repeat.chosen", End(RowOutcome.SURPLUS, "repeat.chosen", setting="groups=2"), Count(4, 4, 0))
    return made


def test_metrics_count_sampled_rows_by_outcome():
    assert keyed(outcome_metrics(account())) == {"fates/trained": 5, "fates/left_out": 3}


def test_the_text_names_sampler_place_and_cause_of_lost_rows():
    assert outcomes_text(account()).splitlines() == [
        "actor.generate: 8 rows, 80 tokens",
        "  left out at choose (count=1): not chosen: 3 rows, 30 tokens",
        "  trained by actor.update: 5 rows, 50 tokens",
    ]


def test_the_accounting_of_a_run_skips_a_torn_line(tmp_path):
    lines = [json.dumps({"iteration": number, **account().as_json()}) for number in range(3)]
    (tmp_path / "fates.jsonl").write_text("\n".join([*lines[:2], lines[2][:40]]))
    total = run_account(tmp_path)
    assert total.sampled["actor.generate"] == Count(4, 16, 160)
    assert total.closes is account().closes
    assert run_account(tmp_path / "none") == RowAccount()


@pytest.mark.parametrize(
    "damage",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "[1, 2]",
        '"x"',
        "\0" * 100,
        '{"fates": [], "sampled": []}',
        '{"fates": {"a": 1}}',
        '{"fates": [[1]]}',
        '{"fates": [{"fate": [1], "source": {}}]}',
        '{"fates": [{"fate": "no such"}]}',
        '{"fates": [], "sampled": {"a": {"groups": 1, "rows": {}, "tokens": 1}}}',
        '{"fates": [], "sampled": {"a": {"groups": 1, "rows": 1e999, "tokens": 1}}}',
        '{"fates": [], "sampled": {"a": {"groups": 1, "rows": -1, "tokens": 1}}}',
    ],
    ids=lambda text: text[:60],
)
def test_the_accounting_skips_a_damaged_line(tmp_path, damage):
    line = json.dumps({"iteration": 0, **account().as_json()})
    (tmp_path / "fates.jsonl").write_text(f"{damage}\n{line}\n")
    assert run_account(tmp_path) == account()
