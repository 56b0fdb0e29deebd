"""Dispatch modes: the three built-in modes, and registered ones."""

import pytest
import torch

from rlflow import ALL, DP_COMPUTE, RANK0, Batch, FlowError, StageError, register_dispatch, row, scalar, stage
from rlflow.author.dispatch import MODES


def sides(batch, ranks):
    return batch.chunk(2 * ranks)


def joined(outputs, batch):
    return Batch.concat(outputs)


@pytest.fixture
def mode():
    yield register_dispatch("HALVES", sides, joined)
    del MODES["HALVES"]


def test_modes_print_as_their_names():
    assert [str(mode) for mode in (DP_COMPUTE, ALL, RANK0)] == ["DP_COMPUTE", "ALL", "RANK0"]


def test_a_registered_mode_splits_and_merges(mode):
    seen = []

    @stage(gives={"doubled": row("float32")}, dispatch=mode)
    def doubled(scores):
        seen.append(len(scores))
        return 2 * scores, {"rows": float(len(scores))}

    assert doubled(Batch.of(scores=[1.0, 2.0, 3.0]))["doubled"].tolist() == [2.0, 4.0, 6.0]
    assert seen == [2, 1]


def test_a_mode_that_loses_rows_is_an_error_with_the_counts():
    lossy = register_dispatch("LOSSY", sides, lambda outputs, batch: outputs[0])
    try:
        same = stage(gives={"same": row("float32")}, dispatch=lossy)(lambda scores: scores)
        with pytest.raises(StageError, match="dispatch LOSSY: found 2 rows of same, expected 3 of same"):
            same(Batch.of(scores=[1.0, 2.0, 3.0]))
    finally:
        del MODES["LOSSY"]


def test_a_name_is_registered_once(mode):
    assert register_dispatch("HALVES", sides, joined) is mode
    with pytest.raises(ValueError, match="the mode 'HALVES' exists"):
        register_dispatch("HALVES", sides, lambda outputs, batch: outputs[0])
    with pytest.raises(ValueError, match="the mode 'RANK0' exists"):
        register_dispatch("RANK0", sides, joined)


def test_all_gives_one_value_per_rank_and_rank0_one_value():
    everywhere = stage(gives={"x": scalar("float32")}, dispatch=ALL)(lambda scores: scores.sum())
    once = stage(gives={"x": scalar("float32")}, dispatch=RANK0)(lambda scores: scores.sum())
    batch = Batch.of(scores=[1.0, 2.0])
    assert everywhere(batch)["x"] == (torch.tensor(3.0),)
    assert once(batch)["x"] == torch.tensor(3.0)


def test_settings_of_any_type_and_length_are_not_split():
    @stage(gives={"same": row("float32")})
    def same(scores, *, table, names):
        assert (len(table), names) == (2, ["a", "b"])
        return scores

    same(Batch.of(scores=[1.0, 2.0]), table=torch.zeros(2), names=["a", "b"])


def test_a_missing_column_of_a_plain_call_is_named_with_its_line():
    same = stage(gives={"same": row("float32")})(lambda score: score)
    with pytest.raises(FlowError) as caught:
        same(Batch.of(scores=[1.0]))
    assert (caught.value.problems[0].nearest, caught.value.problems[0].place.path) == ("scores", __file__)
