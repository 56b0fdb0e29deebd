"""Weights of records, computed from a table."""

import math

import numpy as np
import pytest
import torch

from rlflow import flow, loss, row, stage, table
from rlflow.author.memory import REDUCERS
from rlflow.compiler.trace.compile import TraceOptions, compile_flow
from rlflow.errors import StageError
from rlflow.execution.memory.prompt_draws import PromptDraws
from rlflow.execution.memory.tables import KeptTable

SPEC = table(wins=0.5, tries=0.0)


@loss
def likelihood(new, scores):
    return -new.logprobs * scores[:, None], {}


@stage(gives={"gain": row(torch.float32), "lost": row(torch.int64)})
def gain(wins, tries, *, power):
    return wins * tries**power, (tries - wins).long()


@stage(gives="level")
def level(wins):
    return wins[:, None].expand(-1, 2)


@flow(keeps=lambda hp: {"seen": SPEC})
def remembering(prompts, actor, reward, seen):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    old = seen.read(batch)
    batch |= gain(old, power=2)
    batch |= level(old)
    seen.write(batch | old, wins="last", tries="last")
    actor.update(batch, likelihood)


def draws(by):
    return PromptDraws.of(compile_flow(remembering, None, TraceOptions(prompts_by=by)), None)


def kept(wins, tries):
    """Return the table after iteration 0 has written numbers for the keys 1, 3, 5, ..."""
    keys = torch.arange(len(wins)) * 2 + 1
    columns = {"wins": torch.tensor(wins), "tries": torch.tensor(tries)}
    return KeptTable(SPEC).written(
        0, keys, columns, dict.fromkeys(columns, REDUCERS["last"]), torch.stack([keys, keys], 1)
    )


def test_a_record_that_was_never_written_has_the_weight_of_the_defaults():
    table = kept([2.0, 3.0], [1.0, 2.0])
    ids = np.array([5, 3, 1, 0])
    for by, weights in (
        ("seen.wins", [0.5, 3, 2, 0.5]),
        ("seen.gain", [0, 12, 2, 0]),
    ):
        assert draws(by).weights(table, 0, ids).tolist() == weights
        assert draws(by).weights(table, 0, ids).dtype == np.float64


@pytest.mark.parametrize(
    ("by", "wins", "message"),
    [
        (
            "seen.wins",
            [1.0, -2.0],
            r"record 3 of the data has the weight -2 .--prompts-by seen\.wins.*0 or more",
        ),
        ("seen.gain", [1.0, -2.0], r"stage 'gain' failed in iteration 4 on 2 rows: record 3 .* weight -18"),
        ("seen.gain", [1.0, 2e38], "record 3 of the data has the weight inf"),
        ("seen.lost", [1.0, 9.0], "record 3 of the data has the weight -6"),
        ("seen.level", [1.0, 1.0], "found shape|a number per row"),
    ],
)
def test_a_weight_that_is_no_weight_names_its_stage_and_record(by, wins, message):
    with pytest.raises(StageError, match=message) as raised:
        draws(by).weights(kept(wins, [1.0, 3.0]), 4, np.array([1, 3]))
    if "gain" in by:
        assert raised.value.place.path == __file__
        assert "stage 'gain' at" in raised.value.lines[0]


def test_nan_is_a_weight():
    weights = draws("seen.gain").weights(kept([math.nan, 1.0], [2.0, math.nan]), 0, np.array([1, 3]))
    assert weights.tolist() == [2.0, 0.0]  # NaN writes nothing, so the defaults stay: 0.5 x 4 and 1 x 0
    assert draws(None) is None
