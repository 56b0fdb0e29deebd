"""Names have no meaning: a flow computes the same figures with any names of its roles, stages, metrics and
state."""

import json
import random
import re

import pytest

import rlflow
from rlflow.author.figures import Of
from rlflow.monitoring.funnel import funnel_lines
from rlflow.monitoring.history import summarised
from rlflow.monitoring.keys import by_figure, read
from rlflow.monitoring.metric_names import plainly, renamed
from rlflow.monitoring.plain_display import progress

FLOW = """
from rlflow import RANK0, choose, flow, loss, row, stage

@loss
def {loss}(new, {column}):
    return -new.logprobs * {column}, {{"{one}_loss": new.logprobs}}

@stage(gives="{column}")
def {first}(scores, mask):
    return scores[:, None] * mask, {{"{one}": 0.0, "{two}": 3.0, "{three}": scores}}

@stage(gives={{"{other}": row("bool")}})
def {second}(scores):
    return scores > -1.0, {{"{one}": 0.0, "{two}": 2.0}}

@stage(gives="{state}", dispatch=RANK0)
def {third}({state}):
    return {state} + 1.0

@flow(state=lambda hp: {{"{state}": 0.0}})
def made(prompts, {actor}, {critic}, {judge}):
    rows = {actor}.generate(prompts, samples=2, max_tokens=4)
    rows |= {judge}(rows)
    rows |= {second}(rows)
    rows = choose(rows, "{other}")
    rows |= {first}(rows)
    others = {critic}.generate(prompts, samples=3, max_tokens=5)
    others |= {judge}(others)
    others |= {first}(others)
    {third}(rows)
    {actor}.update(rows, {loss})
    {critic}.update(others, {loss})
"""
PLAIN = {
    "actor": "actor",
    "critic": "critic",
    "judge": "judge",
    "first": "first",
    "second": "second",
    "third": "third",
    "loss": "objective",
    "column": "column",
    "other": "other",
    "state": "height",
    "one": "one",
    "two": "two",
    "three": "three",
}
METRICS = ("one", "two", "three")
IDENTIFIERS = [
    "steps",
    "missing_x",
    "a",
    "a_b",
    "a_b_c",
    "x_1",
    "x_7",
    "policy",
    "reward",
    "response",
    "evaluation",
    "funnel",
    "seconds",
    "generate",
    "update",
    "canary",
    "fates",
    "critic",
    "scores_mean",
    "mean",
    "env",
    "data",
    "kept",
]
TEXTS = [
    *IDENTIFIERS,
    "policy/entropy",
    "reward/missing_rate",
    "missing_calls",
    "update/steps",
    "funnel/rows_sampled",
    "lowest",
    "missing",
    "response/length",
    "actor.update/steps",
    "missing_env_raised",
    "flat_groups",
    "sampled",
]


def hostile(seed):
    """Return a name for each part of the flow, all different except that a metric may share a name."""
    chance = random.Random(seed)
    names = dict(
        zip(
            [part for part in PLAIN if part not in METRICS],
            chance.sample(IDENTIFIERS, len(PLAIN)),
            strict=False,
        )
    )
    return names | dict(zip(METRICS, chance.sample(TEXTS, len(METRICS)), strict=True))


def run_flow(folder, names):
    """Return the figures of each iteration of the flow with these names, mapped to the names of the plain
    flow, and the reported texts of the run."""
    (folder / "flow.py").write_text(FLOW.format(**names))
    run = rlflow.run(
        f"{folder}/flow.py::made",
        backend="null",
        prompts=3,
        iterations=3,
        max_bad=2,
        prove="off",
        save_every=0,
        seed=1,
        out=str(folder),
    )
    table, back = read(run.folder), {name: part for part, name in names.items() if part not in METRICS}
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    figures = [
        by_figure({key: value for key, value in line.items() if key != "iteration"}, table) for line in lines
    ]
    notes = (run.folder / "notes.txt").read_text() if (run.folder / "notes.txt").exists() else ""
    last = summarised(run.folder).figures
    told = (
        len(renamed(last)),
        len(plainly(last)),
        len(progress(last).split()),
        len(funnel_lines(last)),
        "missing" in notes,
    )
    return [
        {_plain(figure, names, back): value for figure, value in line.items() if figure.of is not Of.RUN}
        for line in figures
    ], told


def _plain(figure, names, back):
    caller, method = re.fullmatch(r"([^.#]*)(.*)", figure.node).groups()
    parts = {"node": back.get(caller, caller) + method, "role": back.get(figure.role, figure.role)}
    if figure.of is Of.STAGE:
        parts["name"] = next(part for part in METRICS if names[part] == figure.name)
    elif figure.of is Of.STATE or figure.name == f"{names['one']}_loss":
        parts["name"] = back.get(figure.name, "one_loss")
    return figure._replace(**parts)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run_flow(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.mark.parametrize(
    "seed", [0, 11, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (*range(1, 11), *range(12, 20)))]
)
def test_every_figure_equals_that_of_the_flow_with_plain_names(plain, tmp_path, seed):
    (found, told), (expected, so_told) = run_flow(tmp_path, hostile(seed)), plain
    assert [sorted(line.items()) for line in found] == [sorted(line.items()) for line in expected]
    assert told == so_told
