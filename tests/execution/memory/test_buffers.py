"""A buffer stores, draws and evicts the rows that a list of plain rows says, also after restarts."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.author.columns import Kind, Level
from rlflow.author.memory import buffer
from rlflow.author.node_options import DrawOptions
from rlflow.author.seeds import row_seeds, uniforms
from rlflow.errors import PlanError
from rlflow.execution.account import Count
from rlflow.execution.local_engine import LocalEngine
from rlflow.execution.memory.buffers import KeptBuffer
from rlflow.execution.memory.saved_buffers import restored_buffer, saved_buffer

NAN = math.nan
ENGINE = LocalEngine({}, {}, 0, lambda count: None)


def rows_of(iteration, groups, values):
    """Return a batch of groups of these sizes. The tokens of a row say where it comes from."""
    sizes = torch.tensor(groups, dtype=torch.int64)
    prompts = torch.arange(len(groups)).repeat_interleave(sizes)
    samples = [sample for size in groups for sample in range(size)]
    keys = torch.stack([prompts + 100 * iteration, torch.tensor(samples).long()], 1)
    batch = Batch.of(
        tokens=[
            [iteration, int(prompt), sample][: 1 + sample % 3]
            for prompt, sample in zip(prompts, samples, strict=True)
        ],
        finish=["stop" if sample % 2 else "length" for sample in samples],
        value=[values[prompt] for prompt in prompts.tolist()],
        kinds={"value": Kind(Level.ROW, "float32")},
    )
    return Batch(Axis(keys, grouped=True), batch.data)


class Plain:
    """The same buffer as a list of dicts, one per row."""

    def __init__(self, spec):
        self.spec, self.rows, self.puts, self.gone = spec, [], 0, {"age": 0, "room": 0, "choice": 0}
        self.units = 0

    def put(self, iteration, groups, values):
        own = 0
        for prompt, size in enumerate(groups):
            for sample in range(size):
                unit = self.units + (prompt if self.spec.groups else own)
                own += 1
                path = (100 * iteration + prompt, sample)
                self.rows.append(
                    {"unit": unit, "path": path, "sampled": iteration, "drawn": 0, "value": values[prompt]}
                )
        self.units += len(groups) if self.spec.groups else own
        self.puts += own
        self.leave("age", [row for row in self.rows if not self.young(row, iteration + 1)])
        units = list(dict.fromkeys(row["unit"] for row in self.rows))
        by_value = self.spec.evict == "value"
        if by_value:
            of = {row["unit"]: row["value"] for row in self.rows}
            units.sort(key=lambda unit: (not math.isnan(of[unit]), of[unit], unit))
        over = units[: max(len(units) - self.spec.bound, 0)]
        self.leave("choice" if by_value else "room", [row for row in self.rows if row["unit"] in over])

    def leave(self, cause, rows):
        self.gone[cause] += len(rows)
        self.rows = [row for row in self.rows if row not in rows]

    def young(self, row, iteration):
        return self.spec.max_age is None or iteration - row["sampled"] <= self.spec.max_age

    def draw(self, iteration, seed, options):
        best = {}
        for row in self.rows:
            weight = row["value"] if options.weight else 1.0
            if (
                self.young(row, iteration)
                and weight > 0
                and not (options.strata and math.isnan(row["value"]))
            ):
                [chance] = uniforms(row_seeds(seed, torch.tensor([[row["unit"], 0]])), 1)[:, 0].tolist()
                key = -row["unit"] if options.newest else -math.log1p(-chance) / weight
                best[row["unit"]] = (key, row["value"] if options.strata else 0.0)
        order, turn = [], {}
        for unit, (key, stratum) in sorted(best.items(), key=lambda item: item[1][0]):
            turn[stratum] = turn.get(stratum, 0) + 1
            order.append((turn[stratum], key, unit))
        taken = {unit for *_, unit in sorted(order)[: options.count]}
        return [row for row in self.rows if row["unit"] in taken]


VALUES = st.sampled_from([0.0, 0.5, 1.0, 2.0, NAN])
ITERATION = st.fixed_dictionaries(
    {
        "put": st.lists(st.tuples(st.integers(1, 3), VALUES), max_size=4),
        "draws": st.lists(
            st.builds(
                DrawOptions,
                st.none() | st.integers(0, 5),
                st.sampled_from([None, "value"]),
                st.sampled_from([None, "value"]),
                st.booleans(),
            ),
            max_size=2,
        ),
        "restart": st.booleans(),
    }
)
SPEC = st.builds(
    lambda unit, bound, age, evict: buffer(**{unit: bound}, max_age=age, evict=evict),
    st.sampled_from(["groups", "rows"]),
    st.integers(1, 6),
    st.none() | st.integers(1, 3),
    st.sampled_from(["oldest", "value"]),
)


@given(SPEC, st.lists(ITERATION, max_size=6))
def test_a_buffer_does_what_a_list_of_rows_does(spec, history):
    kept, plain = KeptBuffer.empty(spec, ("value",)), Plain(spec)
    for iteration, step in enumerate(history):
        drawn = []
        for call, options in enumerate(step["draws"]):
            expected = plain.draw(iteration, 7 * iteration + call, options)
            which = kept.chosen(iteration, 7 * iteration + call, options)
            batch = kept.rows(ENGINE, which, iteration)
            assert batch.axis.keys[:, :2].tolist() == [list(row["path"]) for row in expected]
            drawn.append((kept.entries.row[which], batch, expected))
            if expected:
                check_rows(batch, iteration, expected)
        for numbers, _, expected in drawn:
            kept = kept.after_draw(numbers)
            for row in expected:
                row["drawn"] += 1
        groups, values = [size for size, _ in step["put"]], [value for _, value in step["put"]]
        kept = kept.after_put(ENGINE, rows_of(iteration, groups, values), iteration)
        plain.put(iteration, groups, values)
        if step["restart"]:
            again = KeptBuffer.empty(spec, ("value",))
            kept = restored_buffer("past", again, *saved_buffer("past", kept, ENGINE), ENGINE)
        check_totals(kept, plain)


def check_rows(batch, iteration, expected):
    assert batch["age"].tolist() == [iteration - row["sampled"] for row in expected]
    assert batch["drawn"].tolist() == [row["drawn"] for row in expected]
    assert torch.equal(batch["value"], torch.tensor([row["value"] for row in expected]).float()) or any(
        math.isnan(row["value"]) for row in expected
    )
    origins = [(row["sampled"], row["path"][0] % 100, row["path"][1]) for row in expected]
    assert batch.data["tokens"].lists() == [list(origin[: 1 + origin[2] % 3]) for origin in origins]
    groups = [row["path"][0] for row in expected]
    for found in (groups, batch["group"].tolist()):
        assert [a == b for a, b in pairwise(found)] == [a == b for a, b in pairwise(groups)]


def check_totals(kept, plain):
    totals = kept.totals
    live = kept.entries.count()
    assert (live.rows, totals.put.rows) == (len(plain.rows), plain.puts)
    assert {cause: getattr(totals, cause).rows for cause in plain.gone} == plain.gone
    gone = totals.age.plus(totals.room).plus(totals.choice)
    assert live.plus(gone) == totals.put  # units, rows and tokens
    # no more than the double of what is stored takes memory
    assert sum(len(put.rows) for put in kept.puts) <= 2 * len(kept)


def filled(spec, *puts, names=("value",)):
    kept = KeptBuffer.empty(spec, names)
    for iteration, (groups, values) in enumerate(puts):
        kept = kept.after_put(ENGINE, rows_of(iteration, groups, values), iteration)
    return kept


def paths(kept, iteration, options, seed=3):
    return kept.rows(ENGINE, kept.chosen(iteration, seed, options), iteration).axis.keys[:, 0].tolist()


def test_weighted_draws_follow_the_weights():
    kept = filled(buffer(groups=9), ([1] * 4, [1.0, 3.0, 0.0, 4.0]))
    found = [paths(kept, 1, DrawOptions(1, "value"), seed) for seed in range(2000)]
    shares = [sum(place == [n] for place in found) / len(found) for n in range(4)]
    assert shares == pytest.approx([1 / 8, 3 / 8, 0, 4 / 8], abs=0.04)


def test_strata_are_drawn_in_equal_numbers_and_a_short_one_gives_what_it_has():
    kept = filled(buffer(rows=30), ([1] * 10, [0.0] * 6 + [1.0] * 3 + [2.0]))
    of = [0] * 6 + [1] * 3 + [2]
    drawn = [of[path] for path in paths(kept, 1, DrawOptions(7, strata="value"))]
    assert [drawn.count(value) for value in range(3)] == [3, 3, 1]


def test_the_newest_are_drawn_in_stored_order():
    kept = filled(buffer(groups=9), ([2, 1], [1.0, 1.0]), ([1, 2], [1.0, 1.0]))
    assert paths(kept, 2, DrawOptions(3, newest=True)) == [1, 100, 101, 101]


@pytest.mark.parametrize("weight", [-1.0, math.inf])
def test_a_weight_that_is_no_weight_is_an_error(weight):
    kept = filled(buffer(groups=9), ([1, 1], [1.0, weight]))
    with pytest.raises(ValueError, match=rf"found {weight:g} as a weight in 'value'"):
        kept.chosen(1, 0, DrawOptions(1, "value"))


def test_a_row_that_was_drawn_before_keeps_its_age_when_it_is_put_again():
    kept = filled(buffer(groups=9, max_age=5), ([2], [1.0]))
    again = kept.rows(ENGINE, kept.chosen(3, 0, DrawOptions(None)), 3)
    other = KeptBuffer.empty(buffer(groups=9, max_age=5)).after_put(ENGINE, again, 3)
    batch = other.rows(ENGINE, other.chosen(5, 0, DrawOptions(None)), 5)
    assert (batch["age"].tolist(), batch["drawn"].tolist()) == ([5, 5], [0, 0])
    assert batch.axis.keys[:, :2].tolist() == again.axis.keys[:, :2].tolist()


def test_a_put_is_saved_once_and_named_by_its_content():
    kept = filled(buffer(groups=4), ([2], [1.0]), ([1], [1.0]))
    state, files = saved_buffer("past", kept, ENGINE)
    later = kept.after_put(ENGINE, rows_of(2, [1], [1.0]), 2)
    again, more = saved_buffer("past", later, ENGINE)
    assert again["puts"][:2] == state["puts"]
    assert set(more) - set(files) == {again["puts"][2][2]}
    assert [name for name in files if more[name] is not files[name]] == ["past.rows"]


def test_a_buffer_with_other_numbers_is_refused():
    kept = filled(buffer(groups=4), ([2], [1.0]))
    with pytest.raises(PlanError, match="draws by value(.|\n)*draws by none"):
        restored_buffer("past", KeptBuffer.empty(kept.spec), *saved_buffer("past", kept, ENGINE), ENGINE)


def test_rows_put_by_a_later_iteration_are_hidden_from_an_earlier_one():
    kept = filled(buffer(groups=9), ([2], [1.0]), ([1], [1.0]))
    assert kept.before(1).entries.count() == Count(1, 2, 3)
    assert kept.before(2) is kept
