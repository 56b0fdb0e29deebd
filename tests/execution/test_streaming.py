"""Streamed scoring during sampling: it overlaps, gives the same bits, and a failure names its source and
leaves nothing.
"""

import itertools
import threading
from dataclasses import replace

import pytest

from rlflow import StageError, flow, loss
from rlflow.author.batch import Batch
from rlflow.backends.null import Generator, Score
from rlflow.compiler.passes import plan
from rlflow.compiler.placement import Placement
from rlflow.compiler.plan import Streaming
from rlflow.compiler.spans import critical_path
from rlflow.errors import Stopped
from rlflow.execution.pieces import Pieces

ROWS = 24
SECONDS = 20  # longer than any call here


@loss
def policy_loss(new, logprobs, scores):
    return new.logprobs * logprobs * scores[:, None], {"scores": scores}


@flow
def scored(prompts, actor, reward):
    batch = actor.generate(prompts, samples=4, max_tokens=32)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    actor.update(batch, policy_loss)


def streamed(run, chunks):
    """Return the plan of the flow. In one process its forwards alternate with the sampling."""
    made = plan(run.program, streaming=Streaming(chunks, frozenset({"actor"}), frozenset({"reward"})))
    assert made.pieces or chunks == 1
    return made


def outcome(run, chunks, count=ROWS // 4):
    return run.executor.run(streamed(run, chunks), run.stream.take(count))


def results_of(run, chunks, **options):
    """Return the results of an iteration."""
    found = outcome(run, chunks, **options)
    return found.metrics, found.summary, run.learned


@pytest.mark.parametrize("chunks", [2, 3, 7, ROWS, 2 * ROWS])
def test_chunks_change_no_bit(world, chunks):
    assert results_of(world(scored), chunks) == results_of(world(scored), 1)


@pytest.mark.parametrize("count", [0, 1])
def test_few_rows_and_none_change_no_bit(world, count):
    assert results_of(world(scored), 3, count=count)[2] == results_of(world(scored), 1, count=count)[2]


@pytest.mark.parametrize("name", ["adaptive", "remax"])
def test_flows_with_a_baseline_or_a_repeat_give_the_same(world, flows, name):
    one, other = (world(getattr(flows, name)) for _ in range(2))
    results = [
        run.executor.run(
            plan(run.program, streaming=Streaming(chunks, frozenset({"actor"}), frozenset({"reward"}))),
            run.stream.take(6),
        )
        for run, chunks in ((one, 1), (other, 3))
    ]
    assert results[0].metrics == results[1].metrics
    assert one.learned == other.learned


class Waits(Generator):
    """A generator whose second chunk is ready after the first has been scored."""

    scored = None

    def generate_chunks(self, *given):
        for number, chunk in enumerate(super().generate_chunks(*given)):
            assert number != 1 or self.scored.wait(SECONDS), "nothing was scored before all rows were sampled"
            yield chunk


def waiting(run):
    """Make the reward signal that it has scored rows; return the numbers of rows that it got."""
    done, seen = threading.Event(), []
    run.engine.models["actor"].generator.scored = done

    def score(batch):
        seen.append(len(batch))
        done.set()
        return Score()(batch)

    run.engine.scorers["reward"] = score
    return seen


def test_scoring_starts_before_the_last_row_is_sampled(world):
    run = world(scored, generator=Waits)
    seen = waiting(run)
    spans = outcome(run, 4).spans
    assert seen == [6, 6, 6, 6]
    sampling, scoring = (
        [span for span in spans if span.node == name] for name in ("actor.generate", "reward")
    )
    assert (len(sampling), len(scoring)) == (4, 4)
    assert min(span.start for span in scoring) < max(span.end for span in sampling)
    assert all(a.end == b.start for a, b in itertools.pairwise(sampling))
    assert critical_path(spans)[-1].node == "actor.update"


def test_a_failed_piece_ends_the_iteration_after_the_sampling(world):
    run = world(scored, generator=Waits)
    waiting(run)
    inner = run.engine.scorers["reward"]

    def breaks(batch):
        inner(batch)
        raise KeyError("lost")

    run.engine.scorers["reward"] = breaks
    with pytest.raises(StageError, match="stage 'reward' failed in iteration 0 on 8 rows: KeyError: 'lost'"):
        outcome(run, 3)
    assert not run.executor.store.columns
    assert not run.learned


def test_a_sampling_failure_between_chunks_is_named(world):
    class Breaks(Generator):
        def generate_chunks(self, *given):
            yield next(super().generate_chunks(*given))
            raise RuntimeError("out of memory")

    run = world(scored, generator=Breaks)
    with pytest.raises(
        StageError,
        match=r"stage 'actor.generate' failed in iteration 0 on 6 rows: RuntimeError: out of memory",
    ):
        outcome(run, 3)
    assert not run.executor.store.columns


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (lambda chunks: chunks[:2], "found 2 chunks of sampled rows, expected 3"),
        (
            lambda chunks: [chunks[0], chunks[0], chunks[2]],
            "found 24 rows in 3 chunks, expected each of 24 once",
        ),
        (
            lambda chunks: [chunks[0], chunks[1].rows([0]), chunks[2]],
            r"found \d+ rows in 3 chunks, expected each of",
        ),
    ],
)
def test_a_backend_that_loses_or_doubles_rows_is_refused(world, kept, message):
    class Wrong(Generator):
        def generate_chunks(self, *given):
            yield from kept(list(super().generate_chunks(*given)))

    with pytest.raises(StageError, match=message):
        outcome(world(scored, generator=Wrong), 3)


def test_a_chunk_is_kept_until_its_last_reader_ends(world):
    """Two forwards and a reward on their own pools each read every chunk."""
    run = world(scored)
    pools = Placement({"train": 1, "rollout": 1}, {"actor": "train"}, {"actor": "rollout"})
    made = plan(run.program, pools, Streaming(3, frozenset({"actor"}), frozenset({"actor", "reward"})))
    source = made.graph.by_name["actor.generate"]
    pieces, mine = Pieces(made), {number: [] for number in range(3)}
    for piece in made.pieces.values():
        mine[piece.chunk].append(piece)
    assert [len(readers) for readers in mine.values()] == [2, 2, 2]
    for number, (first, last) in mine.items():
        rows = Batch.of(tokens=[[number]] * 2)
        pieces.add(source, number, rows)
        pieces.put(first, rows, {})
        assert pieces.axis(last) is rows.axis
        pieces.put(last, rows, {})
        with pytest.raises(KeyError):
            pieces.axis(last)


def test_a_stop_between_chunks_starts_nothing_new(world):
    class Stops(Generator):
        executor = None

        def generate_chunks(self, *given):
            for chunk in super().generate_chunks(*given):
                self.executor.stopping = True
                yield chunk

    run = world(scored, generator=Stops)
    run.engine.models["actor"].generator.executor = run.executor
    run.engine.scorers["reward"] = lambda batch: pytest.fail("scored after a stop")
    with pytest.raises(Stopped):
        outcome(run, 3)
    assert not run.learned


def test_a_piece_that_never_ends_has_the_deadline_of_its_rows(world):
    run, forever = world(scored), threading.Event()
    run.engine.scorers["reward"] = lambda batch: forever.wait(SECONDS)
    run.engine.reward_timeout = 0.0
    made = streamed(run, 3)
    nodes = tuple(replace(node, timeout=0.2) if node.name == "reward" else node for node in made.graph.nodes)
    made = replace(made, graph=replace(made.graph, nodes=nodes))
    with pytest.raises(
        StageError,
        match=r"stage 'reward' failed in iteration 0 on 8 rows: no result after its deadline of 0.2 s",
    ):
        run.executor.run(made, run.stream.take(ROWS // 4))
    forever.set()
    assert not run.executor.store.columns
