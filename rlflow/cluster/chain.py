"""Stages that follow one another on a pool, in one call of each rank: it goes on with its own rows, whatever the others do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlflow.batch import Batch
from rlflow.cluster.message import Answer, Call
from rlflow.cluster.pulse import MARKS
from rlflow.cluster.route import Routes
from rlflow.cluster.shelf import borrowed
from rlflow.cluster.teams import PLAIN, asked
from rlflow.execution.apply import apply_stage
from rlflow.execution.engine import Link, Linked, Terms
from rlflow.execution.tally import merged

if TYPE_CHECKING:
    from rlflow.cluster.engine import ClusterEngine
    from rlflow.cluster.pool import Pool
    from rlflow.cluster.worker import Worker


def in_one_call(engine: ClusterEngine, pool: Pool[Worker], links: Sequence[Link], terms: Terms) -> list[Linked]:
    """What each stage gave, as far as every rank came. The rows of a rank are those that the first stage by itself would give it."""
    first = links[0]
    split = engine.dispatched(first.stage, first.batch, pool)
    columns = {f"{i}/{name}": data for i, link in enumerate(links) for name, data in link.batch.data.items()}
    told = [{"function": engine.names[id(each.stage)], "settings": dict(each.settings), "seed": engine.seed_of(each.call),
             "inner": dict(each.inner)} for each in links]  # fmt: skip
    routes = Routes(engine.spread(Batch(first.batch.axis, columns), pool.name))
    heads = engine.on_ranks(pool, "stages", routes, asked(split, PLAIN), {"stages": told}, terms, then=len(links) - 1)
    ranks = {rank: [answer, *map(Answer.unpacked, answer.then)] for rank, answer in heads.items()}
    return list(_linked(engine, pool, links, ranks, split, terms))


def _linked(
    engine: ClusterEngine, pool: Pool[Worker], links: Sequence[Link], ranks: Mapping[int, Sequence[Answer]], split: Sequence[Any],
    terms: Terms,
) -> Iterator[Linked]:
    """By stage, of those that all ranks have done."""
    done, shift = min(len(answers) for answers in ranks.values()), time.monotonic() - time.time()
    for number, link in enumerate(links[:done]):
        answers = {rank: found[number] for rank, found in ranks.items()}
        if number:
            engine.remember(pool, "stages", answers, replace(terms, node=link.node))
        rows = engine.kept(pool, answers, split, link.batch.axis)
        tallies = merged([answer.tallies for answer in answers.values()])
        yield Linked(rows, tallies, max(answer.ran[1] for answer in answers.values()) + shift)
    for rank, found in ranks.items():
        for answer in found[done:]:
            engine.note(pool.at(rank), answer.key)


def run_chain(worker: Worker, call: Call, batch: Batch) -> Answer:
    """On a rank: stage after stage, up to the first that raises. The driver asks for that one again, by itself, and hears why; what the
    very first raises is raised."""
    given: list[Batch] = []
    answers: list[Answer] = []
    for number, (told, key) in enumerate(zip(call.arguments["stages"], (call.key, *call.then), strict=True)):
        alone = call._replace(op="stage", key=key, arguments=told)
        with MARKS.during(alone):
            try:
                start = time.time()
                read = _inputs(batch, number, told, given)
                rows, tallies = apply_stage(worker.stage_of(alone), read, told["settings"], told["seed"])
                answers.append(worker.keep(alone, rows, tallies)._replace(ran=(start, time.time())))
            except Exception:
                if not answers:
                    raise
                break
        given.append(rows)
    return answers[0]._replace(then=[answer.frame() for answer in answers[1:]])


def _inputs(batch: Batch, number: int, told: Mapping[str, Any], given: Sequence[Batch]) -> Batch:
    """What one of the stages reads: the columns that came for it, and those that stages before it gave."""
    prefix = f"{number}/"
    own = {name.removeprefix(prefix): data for name, data in batch.data.items() if name.startswith(prefix)}
    return Batch(batch.axis, own | {name: borrowed(given[i].data[source]) for name, (i, source) in told["inner"].items()})
