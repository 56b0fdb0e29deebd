"""The page of a comparison: tables, sentences and the machine."""

import json
from dataclasses import replace

from rlflow.benchmarks.journal import Measured, Turn
from rlflow.benchmarks.report import as_json, cells_of, lines, markdown, number
from rlflow.benchmarks.results import Row, row
from rlflow.benchmarks.suite import Cell, Goal, Settings, Suite
from rlflow.benchmarks.verdicts import Verdict

SUITE = Suite("mine", Settings(), Goal(metric="reward/mean"), (), (Cell("one", "rlflow", "grpo", {}),))
ROW = Row(
    "a|b",
    "k",
    (0, 1),
    12,
    0.51234,
    1.5,
    4096.0,
    8000.0,
    1536.0,
    2_000_000,
    0.25,
    0.5,
    "3 rows trained",
    True,
    {2: "no room"},
)


def test_a_row_is_a_line_of_numbers():
    assert cells_of(ROW) == (
        "a|b",
        "2 failed: 1",
        "12",
        "0.512",
        "1.50",
        "4,096",
        "8,000",
        "1.5 kB",
        "2.0 MB",
        "0.2",
        "0.500",
        "match",
    )
    assert number(None, 3) == ""


def test_sentences_name_failures_wrong_sums_and_the_machine():
    verdict = Verdict("b", "a", "speed", "faster", "faster by half")
    sentences = list(
        lines([ROW, Row("c", "l", (), 0, *[None] * 8, "1 row lost", False, {})], [verdict], ["a note"])
    )
    assert sentences[0] == "b vs a, speed: faster by half"
    assert sentences[1] == "a|b, seed 2 failed: no room"
    assert sentences[2] == "c: the sums of sampled rows and of their outcomes do not match:\n1 row lost"
    assert sentences[3] == "a note"
    assert "cores" in sentences[4]
    assert "torch" in sentences[4]


def test_cells_cannot_break_the_markdown_table():
    page = markdown(SUITE, [ROW], [], [])
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert "reward/mean" in table[0]
    assert table[2].startswith("| a\\|b | 2 failed: 1 |")
    assert "`rlflow bench mine`" in page


def test_json_is_one_line_with_every_field():
    page = json.loads(as_json(SUITE, (), [ROW], [], ["a note"]))
    assert page["cells"][0]["seconds"] == 0.51234
    assert page["cells"][0]["failed"] == {"2": "no room"}
    assert page["notes"] == ["a note"]


def test_an_unmeasured_cell_has_a_row():
    empty = row("one", "k", Measured(), SUITE.goal)
    assert (empty.seconds, empty.rate, empty.last, empty.seeds) == (None, None, None, ())
    turn = Turn(
        0,
        0,
        [{"iteration": 0, "wall": 2.0, "tokens": 10, "metrics": {"reward/mean": 0.5}}],
        [],
        4.0,
        7,
        1.0,
        [0],
    )
    one = row("one", "k", Measured([turn], done={0}), SUITE.goal)
    assert (one.seconds, one.processor, one.tokens, one.rate, one.memory, one.last) == (
        2.0,
        4.0,
        10.0,
        5.0,
        7,
        0.5,
    )
    assert (empty.moved, one.moved) == (None, None)  # unknown, which is not the same as 0 bytes


def test_bytes_are_the_mean_of_timed_iterations():
    rows = [
        {"iteration": number, "wall": 2.0, "tokens": 10, "metrics": {}, "bytes": size}
        for number, size in enumerate((900, 0, 30))
    ]
    cell = row("one", "k", Measured([Turn(0, 0, rows, [], 4.0, 7, 1.0, [1, 2])], done={0}), SUITE.goal)
    assert cell.moved == 15
    assert cells_of(cell)[7] == "15 bytes"
    assert cells_of(replace(cell, moved=0.0))[7] == "0 bytes"
    assert json.loads(as_json(SUITE, (), [cell], [], []))["cells"][0]["moved"] == 15
