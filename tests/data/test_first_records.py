"""A check opens only the first records of data, and decides what these records decide."""

import json
from itertools import count

import pyarrow
import pyarrow.parquet
import pytest

from rlflow.data.first_records import Undecided, open_first
from rlflow.data.json_fields import Wanted
from rlflow.data.records import Splits, opened
from rlflow.data.source import TRIED
from rlflow.errors import PlanError


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet", "d.csv", "hub", "d*.jsonl"])
def test_the_first_records_of_every_format_are_opened(tmp_path, name):
    rows = [{"prompt": str(number)} for number in range(TRIED + 500)]
    (tmp_path / "hub").mkdir()
    (tmp_path / "d.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "d.csv").write_text("prompt\n" + "".join(f"{row['prompt']}\n" for row in rows))
    for path in (tmp_path / "d.parquet", tmp_path / "hub" / "train.parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [record.prompt for record in open_first(tmp_path / name).records] == [
        row["prompt"] for row in rows[:TRIED]
    ]


def test_no_more_lines_are_read_than_asked_for():
    source = Splits("endless", {"": count}).limited(3)
    assert list(source.items("")) == [0, 1, 2]


def test_a_later_bad_line_is_left_to_the_run(tmp_path):
    good = '{"prompt": "x"}\n'
    (tmp_path / "late.jsonl").write_text(good * TRIED + "no record\n")
    (tmp_path / "early.jsonl").write_text(good * (TRIED - 1) + "no record\n")
    assert len(open_first(tmp_path / "late.jsonl")) == TRIED
    with pytest.raises(PlanError, match=rf"early.jsonl:{TRIED}: not valid JSON"):
        open_first(tmp_path / "early.jsonl")
    assert len(opened(tmp_path / "late.jsonl").read("")[1]) == 1


def test_of_a_task_one_question_is_drawn():
    assert len(open_first("chain_sum", task={"size": 500, "min_terms": 2})) == 1
    with pytest.raises(PlanError, match="no parameter 'min_term'"):
        open_first("chain_sum", task={"min_term": 2})


def test_whether_skipped_records_leave_any_is_undecided_if_there_are_more(tmp_path):
    lines = ["no record"] * TRIED
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    (tmp_path / "more.jsonl").write_text("\n".join([*lines, "{}"]))
    with pytest.raises(PlanError, match=f"{TRIED} of {TRIED} records"):
        open_first(tmp_path / "few.jsonl", bad="skip")
    with pytest.raises(Undecided):
        open_first(tmp_path / "more.jsonl", bad="skip")


def test_a_required_field_may_be_in_later_records_if_the_others_are_skipped(tmp_path):
    lines = ['{"prompt": "x"}'] * TRIED
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    (tmp_path / "more.jsonl").write_text("\n".join([*lines, '{"prompt": "x", "level": 1}']))
    wanted = Wanted({"completion": True, "level": True})
    assert len(open_first(tmp_path / "few.jsonl", wanted=wanted, bad="skip")) == TRIED
    with pytest.raises(Undecided):
        open_first(tmp_path / "more.jsonl", wanted=wanted, bad="skip")
    standard = Wanted({"completion": True, "answer": True})
    assert len(open_first(tmp_path / "more.jsonl", wanted=standard, bad="skip")) == TRIED


def test_data_on_the_hub_are_left_to_the_run():
    with pytest.raises(Undecided):
        open_first("owner/name")
