"""Batches keep all values, ignore padding, and merge alike eagerly and traced."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow import RANK0, Batch, FlowError, flow, group, loss, row, scalar, stage, text, token
from rlflow.author.axis import Axis
from rlflow.author.batch import Data, _per_token, flatten, pad, padding
from rlflow.author.columns import Kind, Level
from rlflow.compiler.trace.compile import trace

LENGTHS = st.lists(st.integers(0, 5), max_size=8)


def ragged(lengths):
    return [[float(10 * row + place) for place in range(length)] for row, length in enumerate(lengths)]


def prompts(rows, **more):
    columns = {
        "prompt": [f"p{i}" for i in range(rows)],
        "prompt_tokens": [[i, i + 1][: 1 + i % 2] for i in range(rows)],
    }
    return Batch.of({**columns, **more})


def grouped(sizes, values=None):
    """Return rows of groups of these sizes, with a column of each level; ``keep`` is True for groups at even
    positions.
    """
    ids = [g for g, size in enumerate(sizes) for _ in range(size)]
    rows = range(len(ids))
    kinds = {"prompt_tokens": Kind(Level.PROMPT, "int64"), "bar": scalar("float32")}
    return Batch.of(
        group=ids,
        scores=[float(i) for i in rows],
        rewards=ragged([i % 3 for i in rows]),
        prompt_tokens=[[i] for i in rows],
        completion=[str(i) for i in rows],
        keep=[g % 2 == 0 for g in ids],
        bar=0.5,
        kinds=kinds,
    )


def plain(batch):
    """Return everything in a batch as Python values."""
    return {
        name: value.tolist() if isinstance(value := batch[name], torch.Tensor) else value
        for name in batch.columns
    }


# -- padding
# ------------------------------------------------------------------------------------------------------------


@given(LENGTHS)
def test_padded_columns_are_trimmed_again(lengths):
    flat = torch.arange(float(sum(lengths)))
    sizes = torch.tensor(lengths, dtype=torch.int64)
    padded = pad(flat, sizes)
    assert padded.shape == (len(lengths), max(lengths, default=0))
    assert torch.equal(flatten(padded, sizes), flat)


@given(LENGTHS)
def test_padding_has_the_test_value_in_floats_and_0_elsewhere(lengths):
    sizes = torch.tensor(lengths, dtype=torch.int64)
    outside = torch.arange(max(lengths, default=0)) >= sizes[:, None]
    with padding(float("nan")):
        assert bool(pad(torch.ones(sum(lengths)), sizes)[outside].isnan().all())
        assert not bool(pad(torch.ones(sum(lengths), dtype=torch.int64), sizes)[outside].any())
    assert not bool(pad(torch.ones(sum(lengths)), sizes)[outside].any())


@given(LENGTHS)
def test_a_column_keeps_its_values(lengths):
    values = ragged(lengths)
    batch = Batch.of(rewards=values)
    assert len(batch) == len(lengths)
    assert [line[:length] for line, length in zip(batch["rewards"].tolist(), lengths, strict=True)] == values


def test_only_a_ragged_column_has_ragged_rows():
    batch = Batch.of(tokens=[[1, 2], [], [3]], scores=[1.0, 2.0, 3.0])
    assert (
        [row.tolist() for row in batch.data["tokens"].split()]
        == batch.data["tokens"].lists()
        == [[1, 2], [], [3]]
    )
    assert batch.data["tokens"].row_lengths.tolist() == [2, 0, 1]
    assert batch.data["tokens"].take(torch.zeros(0, dtype=torch.int64), batch.axis).lists() == []
    with pytest.raises(TypeError, match="found a row column"):
        batch.data["scores"].split()


@pytest.mark.parametrize("name", ["rewards", "scores", "group", "keep", "prompt_tokens"])
def test_writing_into_a_read_column_leaves_the_batch_unchanged(name):
    batch = grouped([1, 1])
    batch[name].zero_()
    assert plain(batch) == plain(grouped([1, 1]))


# -- kinds
# ------------------------------------------------------------------------------------------------------------


def test_standard_columns_have_the_table_kind_and_others_are_inferred():
    batch = Batch.of(
        tokens=[[1, 2], [3]],
        mask=[[1, 0], [1]],
        scores=[1, 2],
        answer=["a", "b"],
        own=[[1.5], []],
        flag=[True, False],
        bar=3,
    )
    assert {name: str(kind) for name, kind in batch.columns.items()} == {
        "tokens": "token int64",
        "mask": "token bool",
        "scores": "row float32",
        "answer": "text",
        "own": "token float32",
        "flag": "row bool",
        "bar": "scalar int64",
    }
    assert repr(batch.select("answer", "mask")) == "Batch(2 rows; answer: text, mask: token bool)"


def test_float64_is_kept():
    assert str(Batch.of(scores=torch.ones(2, dtype=torch.float64)).columns["scores"]) == "row float64"


def test_columns_of_a_batch_have_the_same_length():
    with pytest.raises(FlowError, match="differ in their number of rows"):
        Batch.of(scores=[1, 2], answer=["a"])


def test_rows_of_one_group_are_adjacent():
    assert Batch.of(group=[4, 4, 7], scores=[1, 2, 3]).axis.slots.tolist() == [0, 0, 1]
    assert Batch.of(group=[4, 4, 7]).axis.keys.tolist() == [[4, 0], [4, 1], [7, 0]]
    with pytest.raises(FlowError, match="not adjacent"):
        Batch.of(group=[4, 7, 4])


@pytest.mark.parametrize(
    "use",
    [
        lambda b: b["score"],
        lambda b: b.select("score"),
        lambda b: b.drop("score"),
        lambda b: b.rename(score="x"),
    ],
)
def test_a_missing_column_is_named_with_its_nearest_and_the_line(use):
    with pytest.raises(FlowError) as caught:
        use(Batch.of(scores=[1.0]))
    problem = caught.value.problems[0]
    assert (problem.code, problem.nearest, problem.place.path) == ("missing-column", "scores", __file__)


def test_an_index_is_refused_as_a_column():
    with pytest.raises(FlowError, match="no column '0'"):
        Batch.of(scores=[1.0])[0]


def test_renaming_swaps_and_replaces():
    batch = Batch.of(scores=[1.0], difficulty=[2.0], weight=[3.0])
    assert plain(batch.rename(scores="difficulty", difficulty="scores")) == {
        "scores": [2.0],
        "difficulty": [1.0],
        "weight": [3.0],
    }
    assert plain(batch.rename(weight="scores")) == {"scores": [3.0], "difficulty": [2.0]}
    assert plain(batch) == {"scores": [1.0], "difficulty": [2.0], "weight": [3.0]}


# -- rows
# ------------------------------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(1, 3), max_size=5)


@given(SIZES, st.data())
def test_taking_rows_takes_every_column(sizes, data):
    batch = grouped(sizes)
    index = data.draw(st.lists(st.integers(0, max(len(batch) - 1, 0)), max_size=6)) if len(batch) else []
    taken = batch.rows(index)
    whole = plain(batch)
    assert taken["completion"] == [str(i) for i in index]
    assert taken["scores"].tolist() == [float(i) for i in index]
    assert taken["keep"].tolist() == [whole["keep"][i] for i in index]
    lines = zip(taken["rewards"].tolist(), index, strict=True)
    assert [line[: i % 3] for line, i in lines] == [
        [10.0 * i + place for place in range(i % 3)] for i in index
    ]
    assert taken.axis.keys.tolist() == batch.axis.keys[index].tolist()


@given(SIZES)
def test_a_mask_takes_the_marked_rows(sizes):
    batch = grouped(sizes)
    kept = batch.rows(batch["keep"]) if len(batch) else batch
    assert kept["keep"].tolist() == [True] * len(kept)
    assert len(kept) == sum(size for g, size in enumerate(sizes) if g % 2 == 0)


@given(SIZES)
def test_group_columns_are_stored_once_per_group(sizes):
    batch = grouped(sizes)
    assert batch.data["keep"].value.tolist() == [g % 2 == 0 for g in range(len(sizes))]
    assert batch.axis.groups == len(sizes)


@settings(deadline=None)
@given(SIZES, st.integers(1, 6))
def test_joined_chunks_equal_the_batch_even_if_a_chunk_cuts_a_group(sizes, count):
    batch = grouped(sizes)
    chunks = batch.chunk(count)
    assert [len(chunk) for chunk in chunks if len(chunk)] == sorted(
        (len(c) for c in chunks if len(c)), reverse=True
    )
    joined = Batch.concat(chunks)
    assert plain(joined) == plain(batch)
    assert joined.axis.keys.tolist() == batch.axis.keys.tolist()
    assert len(joined.data["keep"].value) == joined.axis.groups == len(sizes)


@given(st.integers(0, 4), st.integers(1, 4))
def test_repeated_rows_are_adjacent_and_form_a_group(rows, times):
    repeated = prompts(rows).repeat(times)
    assert repeated["prompt"] == [f"p{i}" for i in range(rows) for _ in range(times)]
    assert repeated["group"].tolist() == [i for i in range(rows) for _ in range(times)]
    assert repeated.axis.keys.tolist() == [[i, j] for i in range(rows) for j in range(times)]
    assert repeated.axis.grouped


def test_repeating_twice_keeps_row_keys_unique():
    keys = prompts(2).repeat(2).repeat(3).axis.keys.tolist()
    assert keys == [[position, sample] for position in range(2) for sample in range(6)]


def test_batches_with_other_columns_or_kinds_are_not_joined():
    with pytest.raises(FlowError, match="different columns"):
        Batch.concat([Batch.of(scores=[1.0]), Batch.of(scores=[1.0], answer=["a"])])
    with pytest.raises(FlowError, match="different columns"):
        Batch.concat([Batch.of(own=[1.0]), Batch.of(own=[[1.0]])])
    with pytest.raises(FlowError, match="no batches"):
        Batch.concat([])


def test_every_operation_accepts_a_batch_without_rows():
    empty = grouped([])
    assert len(empty) == len(empty.repeat(3)) == len(Batch.concat(empty.chunk(3))) == len(empty.rows([])) == 0
    assert empty["rewards"].shape == (0, 0)
    assert empty.axis.groups == 0


# -- merging: eager = traced
# -------------------------------------------------------------------------------------------------------


class Real:
    """The rows of the cases below, as real axes."""

    def __init__(self):
        self.prompts = Axis.fresh(3)
        self.others = Axis.fresh(3)
        self.rows = self.prompts.repeat(4)
        self.more = self.prompts.repeat(4)
        self.single = self.prompts.repeat(1)
        self.twin = self.prompts.repeat(1)

    def column(self, axis, level):
        axis = getattr(self, axis)
        value = torch.arange(float(len(axis)))
        if level is Level.TOKEN:
            return Batch(
                axis, {"x": Data(Kind(level, "float32"), value, torch.ones(len(axis), dtype=torch.int64))}
            )
        return Batch(
            axis, {"x": Data(Kind(level, "float32"), value[: axis.groups] if level is Level.GROUP else value)}
        )


MERGES = {
    ("prompts", "prompts", Level.TOKEN): True,
    ("rows", "rows", Level.TOKEN): True,
    ("rows", "rows", Level.GROUP): True,
    ("rows", "prompts", Level.ROW): True,
    ("rows", "prompts", Level.TOKEN): False,
    ("rows", "single", Level.ROW): True,
    ("rows", "single", Level.GROUP): True,
    ("rows", "single", Level.TOKEN): False,
    ("single", "twin", Level.ROW): True,
    ("single", "twin", Level.TOKEN): False,
    ("rows", "more", Level.ROW): False,
    ("single", "rows", Level.ROW): False,
    ("single", "rows", Level.GROUP): True,
    ("more", "rows", Level.GROUP): True,
    ("prompts", "rows", Level.ROW): False,
    ("prompts", "rows", Level.GROUP): True,
    ("prompts", "single", Level.ROW): True,
    ("prompts", "single", Level.TOKEN): False,
}


@pytest.mark.parametrize(("onto", "of", "level"), MERGES)
def test_related_rows_are_merged_and_others_refused(onto, of, level):
    real = Real()
    batch = Batch(getattr(real, onto), {})
    if not MERGES[onto, of, level]:
        with pytest.raises(FlowError, match="different rows"):
            batch | real.column(of, level)
        return
    merged = batch | real.column(of, level)
    position = merged.axis.keys[:, 0].tolist()
    expected = list(range(len(batch))) if onto == of and level is not Level.GROUP else position
    assert merged["x"].flatten().tolist() == [float(i) for i in expected]


@pytest.mark.parametrize(("onto", "of", "level"), MERGES)
def test_a_trace_merges_like_real_batches(onto, of, level):
    giver = {
        Level.ROW: stage(gives={"x": row("float32")})(lambda prompt_tokens: prompt_tokens[:, 0].float()),
        Level.GROUP: stage(gives={"x": group("float32")}, dispatch=RANK0)(
            lambda prompt_tokens: prompt_tokens[:, 0].float()
        ),
        Level.TOKEN: stage(gives={"x": token("float32")})(lambda tokens: tokens.float()),
    }[level]

    @loss
    def x_loss(new, x):
        return new.logprobs * x, {}

    @flow(data={"completion": text})
    def f(prompts, actor):
        made = {
            "prompts": prompts,
            "rows": actor.generate(prompts, samples=4, max_tokens=2),
            "more": actor.generate(prompts, samples=4, max_tokens=2),
            "single": actor.generate(prompts, max_tokens=2),
            "twin": actor.generate(prompts, max_tokens=2),
        }
        actor.update(made[onto] | giver(made[of]), x_loss)

    codes = [p.code for p in trace(f).problems if p.severity == "error"]
    assert codes == ([] if MERGES[onto, of, level] else ["row-axes"])


def test_the_column_of_the_second_batch_wins():
    batch = Batch.of(scores=[1.0, 2.0])
    assert (batch | batch.rename(scores="x").rename(x="scores"))["scores"].tolist() == [1.0, 2.0]
    other = Batch(batch.axis, Batch.of(scores=[3.0, 4.0]).data)
    assert (batch | other)["scores"].tolist() == [3.0, 4.0]


def test_equal_values_are_not_treated_as_the_same_rows():
    with pytest.raises(FlowError, match="different rows"):
        Batch.of(scores=[1.0]) | Batch.of(values=[[1.0]])


def test_a_baseline_finds_its_prompt_after_a_choice_of_rows():
    base = prompts(3)
    rows = base.repeat(2)
    greedy = Batch(base.axis.repeat(1), {}) | Batch(base.axis, Batch.of(baseline=[0.0, 10.0, 20.0]).data)
    some = rows.rows([5, 0, 3])
    assert (some | greedy.select("baseline"))["baseline"].tolist() == [20.0, 0.0, 10.0]


def test_only_batches_are_merged():
    with pytest.raises(TypeError):
        Batch.of(scores=[1.0]) | {"scores": [2.0]}


def test_the_bytes_of_a_column_include_values_and_lengths():
    batch = Batch.of(tokens=[[1, 2, 3], [4]])
    assert batch.data["tokens"].nbytes == 8 * 4 + 8 * 2
    assert Data(Kind(Level.ROW, "float32"), torch.zeros(3)).nbytes == 12


@pytest.mark.parametrize(
    "column",
    [
        Data(Kind(Level.ROW, "int64"), torch.zeros(2, dtype=torch.int64)),
        Data(Kind(Level.TOKEN, "float32"), torch.zeros(4), torch.tensor([2, 2])),
    ],
)
def test_only_row_floats_become_values_of_single_tokens(column):
    with pytest.raises(FlowError):
        _per_token("x", column, Axis.fresh(2))
