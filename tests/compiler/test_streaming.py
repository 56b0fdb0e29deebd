"""Streaming in a plan: the nodes split into pieces. The scheduler starts each piece with its chunk and loses
nothing.
"""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.author.load import load_flow
from rlflow.compiler.graph.model import Column, Op
from rlflow.compiler.passes import plan
from rlflow.compiler.passes.queues import room_of
from rlflow.compiler.placement import Placement
from rlflow.compiler.plan import Streaming
from rlflow.compiler.scheduler import Finish, Free, Scheduler, StartNode
from rlflow.compiler.simulate import simulate
from rlflow.compiler.trace.compile import TraceOptions, compile_flow

ROLES = ("actor", "critic", "reference", "reward", "rewards")
EXACT = frozenset(ROLES)
POOLS = Placement(
    {"train": 1, "rollout": 1}, dict.fromkeys(("actor", "critic", "reference"), "train"), {"actor": "rollout"}
)
FORWARDS = ("actor.logprobs", "reference.logprobs", "critic.values")


@cache
def planned(name, chunks, exact=EXACT, pools=POOLS, by=EXACT):
    return plan(program(name), pools, Streaming(chunks, by, exact))


@cache
def program(name):
    return compile_flow(load_flow(name))


def cut(made):
    return {made.graph.nodes[i].name for i in made.in_pieces}


def shown(made):
    return next(note.what for note in made.notes if note.name == "stream")


def test_a_plan_without_chunks_is_unchanged():
    assert planned("ppo", 1, frozenset(), by=frozenset()) == plan(program("ppo"), POOLS)
    assert shown(planned("ppo", 1)) == "nothing is scored before all rows are sampled"
    assert planned("ppo", 1).units == planned("ppo", 1).live


def test_independent_scoring_of_rows_is_split():
    made = planned("ppo", 3)
    assert cut(made) == {"reward", *FORWARDS}
    assert (
        shown(made)
        == "actor.generate gives 3 chunks to reward, actor.logprobs, reference.logprobs, critic.values"
    )
    assert len(made.pieces) == 12
    assert {made.works_in(i) for i in made.in_pieces} == {"rollout.io", "train"}
    assert made.ahead == {}  # critic.update cannot continue from pieces


def test_a_forward_whose_rounding_depends_on_other_rows_is_not_split():
    made = planned("ppo", 3, frozenset({"reward"}))
    assert cut(made) == {"reward"}
    assert shown(made).endswith(
        "; not to actor.logprobs, reference.logprobs, critic.values (rounding depends on the other rows)"
    )
    assert made.ahead


@pytest.mark.parametrize(
    "pools",
    [None, Placement({"all": 2}, dict.fromkeys(("actor", "critic", "reference"), "all"), {"actor": "all"})],
)
def test_models_that_alternate_with_sampling_are_not_split(pools):
    made = planned.__wrapped__("ppo", 3, pools=pools)
    assert cut(made) == {"reward"}
    assert "(alternates with actor.generate)" in shown(made)


def test_a_generator_without_chunks_streams_nothing():
    made = planned("ppo", 3, by=frozenset())
    assert not made.pieces
    assert "(the generator of actor gives all rows at once)" in shown(made)


def test_nodes_that_need_all_rows_are_not_split(tmp_path):
    (tmp_path / "late.py").write_text("""
from rlflow import flow, loss, stage

@stage(gives="temperature", rows="group")
def warmer(temperature):
    return 2 * temperature

@loss
def policy_loss(new, logprobs, scores):
    return new.logprobs * logprobs * scores[:, None], {}

@flow
def late(prompts, actor, reference, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= warmer(batch)
    batch |= reference.logprobs(batch)
    actor.update(batch, policy_loss)
""")
    made = plan(compile_flow(load_flow(str(tmp_path / "late.py"))), POOLS, Streaming(3, EXACT, EXACT))
    assert cut(made) == {"reward"}
    assert shown(made).endswith("; not to reference.logprobs (reads warmer, which waits for all rows)")


def test_the_body_of_a_repeat_is_split_with_chunks_per_try():
    (body,) = planned("dapo", 2).bodies.values()
    assert cut(body) == {"reward"}
    remax = planned("remax", 2)
    assert len(remax.chunks) == 2
    assert {len(ids) for ids in remax.chunks.values()} == {1}
    assert len({piece.source for piece in remax.pieces.values()}) == 2


def test_pieces_start_with_their_chunks_and_successors_after_the_last():
    made = planned("ppo", 3, frozenset({"reward"}))
    names, seen = {node.name: node.id for node in made.graph.nodes}, []
    scheduler = Scheduler(made, room_of(POOLS))

    def lines(instructions):
        scheduler.validate()
        seen[:] = [
            made.node(i.node).name + (f" {made.pieces[i.node].chunk}" if i.node in made.pieces else "")
            for i in instructions
            if isinstance(i, StartNode)
        ]
        return seen

    def pieces():
        return [i for i in scheduler.running if i in made.pieces]

    lines(scheduler.begin())
    assert lines(scheduler.done(names["prompts"])) == ["actor.generate"]
    first, second = made.chunks[names["actor.generate"]]
    assert lines(scheduler.released(first)) == ["reward 0"]
    assert lines(scheduler.done(pieces()[0])) == []
    assert lines(scheduler.released(second)) == ["reward 1"]
    assert "reward 2" in lines(scheduler.done(names["actor.generate"]))
    assert lines(scheduler.done(pieces()[0])) == []
    assert lines(scheduler.done(pieces()[0])) == ["reward"]  # joins the outputs of the pieces


RATED = """
from rlflow import flow, loss, row, stage

@stage(gives={"hard": row("float32")})
def rate(prompt_tokens):
    return prompt_tokens[:, 0].float()

@loss
def policy_loss(new, logprobs, scores):
    return new.logprobs * logprobs * scores[:, None], {}

@flow
def rated(prompts, actor, reward):
    prompts |= rate(prompts)
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    actor.update(batch, policy_loss)
"""


def test_a_piece_waits_for_its_other_inputs(tmp_path):
    """The chunk of a prompt's difficulty rating is ready later than the chunk of its samples."""
    (tmp_path / "rated.py").write_text(RATED)
    reads = TraceOptions(1, ("completion", "answer", "hard"))
    made = plan(
        compile_flow(load_flow(str(tmp_path / "rated.py")), None, reads),
        POOLS,
        Streaming(2, EXACT, frozenset({"reward"})),
    )
    names = {node.name: node.id for node in made.graph.nodes}
    scheduler = Scheduler(made, room_of(POOLS))
    scheduler.begin()
    scheduler.done(names["prompts"])
    assert scheduler.running == {names["rate"], names["actor.generate"]}
    (chunk,) = made.chunks[names["actor.generate"]]
    assert scheduler.released(chunk) == []
    scheduler.validate()
    assert {made.pieces[i.node].chunk for i in scheduler.done(names["rate"]) if isinstance(i, StartNode)} == {
        0
    }
    scheduler.validate()


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["ppo", "remax", "online_dpo", "prime"]), st.integers(2, 5), st.booleans(), st.data())
def test_every_piece_runs_once_after_its_chunk_in_any_order(name, chunks, exact, data):
    made = planned(name, chunks, EXACT if exact else frozenset({"reward"}))
    fails, draw = (
        data.draw(st.sampled_from([None, *made.units])),
        data.draw(st.randoms(use_true_random=False)),
    )
    scheduler, over, started, there, stored = Scheduler(made, room_of(POOLS)), None, [], set(), set()
    left = {source: list(ids) for source, ids in made.chunks.items()}
    instructions = scheduler.begin()
    while True:
        scheduler.validate()
        for instruction in instructions:
            if isinstance(instruction, StartNode):
                assert made.waits_for[instruction.node] <= there
                started.append(instruction.node)
            elif isinstance(instruction, Free):
                assert set(instruction.columns) <= stored
                stored -= set(instruction.columns)
            else:
                over = instruction
        if over:
            break
        unit = draw.choice(sorted(scheduler.running))
        if left.get(unit):  # a sampling node delivers all its chunks before it ends
            there.add(left[unit][0])
            instructions = scheduler.released(left[unit].pop(0))
        elif unit == fails:
            instructions = scheduler.failed(unit)
        else:
            there.add(unit)
            stored |= set(made.gives[unit])
            instructions = scheduler.done(unit)
    assert over == Finish(fails is not None)
    assert len(started) == len(set(started))
    assert fails is not None or set(started) == set(made.units)
    assert not stored


SECONDS = {Op.GENERATE: 80.0, Op.LOGPROBS: 20.0, Op.VALUES: 20.0, Op.REWARD: 40.0, Op.UPDATE: 30.0}


def seconds(node):
    return SECONDS.get(node.op, 0.0)


@pytest.mark.parametrize(("chunks", "makespan"), [(1, 200.0), (2, 170.0), (4, 155.0), (8, 147.5)])
def test_scoring_overlaps_sampling_in_virtual_time(chunks, makespan):
    """PPO: 80 s of sampling, then three forwards of 20 s one after another and two updates of 30 s. After the
    last row, only one chunk of the forwards is left.
    """
    simulation = simulate(planned("ppo", chunks), seconds, room_of(POOLS))
    assert simulation.makespan == makespan
    assert simulation.bound <= makespan
    spans = [span for span in simulation.spans if span.node == "actor.generate"]
    assert (len(spans), spans[-1].end) == (chunks, 80.0)


def test_a_long_tail_leaves_more_overlap_than_even_lengths():
    tailed = [
        simulate(planned("ppo", 4), seconds, room_of(POOLS), ended)
        for ended in (lambda rows: rows, lambda rows: rows**4)
    ]
    assert tailed[1].makespan <= tailed[0].makespan
    first = [min(span.end for span in run.spans if span.node == "actor.generate") for run in tailed]
    assert first == [20.0, 80.0 * 0.25**4]


def test_a_split_node_gives_the_columns_of_the_node():
    made = planned("ppo", 3)
    (reward,) = (i for i in made.in_pieces if made.graph.nodes[i].name == "reward")
    assert made.gives[reward] == (Column(reward, "scores"),)
    assert all(made.gives[i] == () and made.reads[i] == frozenset() for i in made.pieces)
