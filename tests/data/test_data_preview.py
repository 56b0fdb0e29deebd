"""A preview shows the rows that a run will read and counts every skipped record."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.data import open_data
from rlflow.data.data_preview import preview
from rlflow.data.faults import Room


def write(folder, records):
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_preview_shows_the_rows_of_a_run(tmp_path, tokenizer):
    data = open_data(write(tmp_path, [{"prompt": "1 + 1 =", "answer": "2", "level": 3}]), tokenizer=tokenizer)
    shown = preview(data, 3)
    (row,) = shown.rows
    assert list(row.prompt.ids) == data.batch([0]).data["prompt_tokens"].value.tolist()
    assert row.prompt.text == "<user>1 + 1 =\n<assistant>"
    assert row.columns == {"answer": "2"}
    assert row.place == f"{tmp_path / 'd.jsonl'}:1"
    assert shown.unread == ("level",)
    assert "chat template" in shown.wording


def test_special_tokens_are_marked_in_place(tmp_path, tokenizer):
    data = open_data(write(tmp_path, [{"prompt": "a", "completion": "b"}]), tokenizer=tokenizer, chat=False)
    (row,) = preview(data, 1).rows
    assert row.prompt.special == {0: "<bos>"}
    assert row.response is not None
    assert row.response.special == {1: "<eos>"}
    assert row.response.text == "b<eos>"


def test_a_pair_is_two_rows_with_one_prompt(tmp_path):
    data = open_data(write(tmp_path, [{"prompt": "p", "chosen": "yes", "rejected": "no"}]))
    shown = preview(data, 1)
    assert shown.wording == "as bytes, since the run has no model"
    assert [row.response.text for row in shown.rows if row.response] == ["yes", "no"]
    assert [row.columns["chosen"] for row in shown.rows] == [True, False]
    assert shown.prompts is not None
    assert shown.prompts.count == 1
    assert shown.responses is not None
    assert shown.responses.count == 2


def test_a_nested_field_is_read(tmp_path):
    record = {"prompt": "p", "reward_model": {"ground_truth": "7", "style": "rule"}, "source": "x"}
    data = open_data(write(tmp_path, [record]), fields={"answer": "reward_model.ground_truth"})
    assert preview(data, 0).fields == {"prompt": "prompt", "answer": "reward_model.ground_truth"}
    assert preview(data, 0).unread == ("source",)


@pytest.mark.parametrize(("count", "high"), [(1, 1), (19, 19), (20, 19), (21, 20), (100, 95)])
def test_lengths_are_summarised_by_median_and_95th_percentile(tmp_path, count, high):
    data = open_data(write(tmp_path, [{"prompt": "x" * length} for length in range(count, 0, -1)]))
    shown = preview(data, 0).prompts
    assert (shown.count, shown.shortest, shown.median, shown.longest_of_95, shown.longest) == (
        count,
        1,
        (count + 1) // 2,
        high,
        count,
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 40))
def test_every_record_is_used_or_skipped_with_a_cause(tmp_path_factory, lengths, room):
    path = write(tmp_path_factory.mktemp("data"), [{"prompt": "x" * length} for length in lengths])
    shown = preview(open_data(path, bad="skip").within(Room(room)), 2)
    fitting = sorted(length for length in lengths if 0 < length <= room)
    assert shown.records == len(fitting)
    assert shown.records + sum(cause.count for cause in shown.left_out) == len(lengths)
    assert len(shown.rows) == min(2, len(fitting))
    if shown.prompts:
        assert (shown.prompts.shortest, shown.prompts.longest) == (fitting[0], fitting[-1])
        assert sum(length <= shown.prompts.longest_of_95 for length in fitting) >= 0.95 * len(fitting)
        assert sum(length < shown.prompts.longest_of_95 for length in fitting) < 0.95 * len(fitting)
        assert sum(length <= shown.prompts.median for length in fitting) >= len(fitting) / 2


def test_a_preview_is_plain_json(tmp_path):
    shown = preview(open_data(write(tmp_path, [{"prompt": "ü"}])), 1)
    assert json.loads(json.dumps(shown.as_json()))["rows"][0]["prompt"]["ids"] == [195, 188]


def test_a_task_previews_rows_without_a_file(tmp_path):
    pytest.importorskip("reasoning_gym")
    shown = preview(open_data("chain_sum", task={"size": 4}), 1)
    assert shown.rows[0].place == ""
    assert shown.fields == {}


def test_pairs_with_equal_responses_are_reported(tmp_path):
    pairs = [{"prompt": "a", "chosen": "b", "rejected": other} for other in "bc"]
    assert preview(open_data(write(tmp_path, pairs)), 0).equal_pairs.startswith(
        "1 of 2 pairs have the same ids in both responses"
    )
