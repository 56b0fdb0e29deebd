"""Mistakes in what a flow keeps across iterations, each reported at its line."""

import pytest
import torch

from rlflow import FlowError, buffer, concat, ema, flow, loss, repeat, row, stage, table
from rlflow.author.source_lines import definition_place
from rlflow.compiler.graph.wire import identity, pack, unpack
from rlflow.compiler.trace.compile import compile_flow, trace

SEEN = {"seen": table(key="prompt_id", wins=0.0, tries=0.0)}


@loss
def likelihood(new, scores):
    return -new.logprobs * scores[:, None], {}


@stage(gives={"wins": row(torch.float32), "tries": row(torch.float32)})
def outcomes(scores):
    return scores, torch.ones_like(scores)


def kept(call, keeps=lambda hp: SEEN):
    """Return a flow that makes this call on its rows and its table."""

    @flow(keeps=keeps)
    def remembering(prompts, actor, reward, seen):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        call(batch, seen)
        actor.update(batch, likelihood)

    return remembering


MISTAKES = {
    "keeps-nothing": lambda batch, seen: seen.write(batch),
    "keeps-column": lambda batch, seen: seen.write(batch | outcomes(batch), wims="add"),
    "keeps-reducer": lambda batch, seen: seen.write(batch | outcomes(batch), wins="ad"),
    "keeps-order": lambda batch, seen: (
        seen.write(batch | outcomes(batch), wins="add"),
        seen.read(batch),
    ),
    "keeps-written": lambda batch, seen: [seen.write(batch | outcomes(batch), wins="add") for _ in range(2)],
    "unknown-setting": lambda batch, seen: seen.read(batch, every=2),
    "keeps-stale": lambda batch, seen: seen.read(batch, stale_ok=""),
    "keeps-ema": lambda batch, seen: seen.write(batch | outcomes(batch), wins=ema(1)),
    "unknown-verb": lambda batch, seen: seen.raed(batch),
    "missing-column": lambda batch, seen: seen.write(batch, wins="add"),
}


@pytest.mark.parametrize("code", MISTAKES)
def test_a_mistake_is_reported_at_its_line(code):
    call = MISTAKES[code]
    with pytest.raises(FlowError) as raised:
        compile_flow(kept(call))
    problem = raised.value.problems[0]
    assert problem.code == code
    assert problem.place.path == __file__
    assert problem.place.line >= definition_place(call).line
    assert problem.remedy


def test_a_near_name_is_proposed():
    with pytest.raises(FlowError) as raised:
        compile_flow(kept(MISTAKES["keeps-column"]))
    assert raised.value.problems[0].nearest == "wins"


@pytest.mark.parametrize(
    ("keeps", "code"),
    [
        (lambda hp: {"seen": 3}, "keeps"),
        (lambda hp: 1 / 0, "keeps"),
        (lambda hp: {"scene": SEEN["seen"]}, "keeps-parameter"),
        (lambda hp: {"prompts": SEEN["seen"]}, "keeps-parameter"),
        (lambda hp: {"seen": table(key="prompt_id")}, "keeps-table"),
        (lambda hp: {"seen": table(wins="none")}, "keeps-table"),
        (lambda hp: {"seen": table(wins=1e300)}, "keeps-table"),
        (lambda hp: {"seen": table(key="group", wins=0.0)}, "keeps-table"),
    ],
)
def test_a_wrong_declaration_is_reported_at_the_flow(keeps, code):
    with pytest.raises(FlowError) as raised:
        compile_flow(kept(lambda batch, seen: None, keeps))
    assert raised.value.problems[0].code == code
    assert raised.value.problems[0].place.path == __file__


def test_a_table_is_no_role():
    with pytest.raises(FlowError, match="table 'seen' is called like a role"):
        compile_flow(kept(lambda batch, seen: seen(batch)))


def test_a_table_can_not_have_the_name_of_the_data():
    with pytest.raises(FlowError, match="that parameter is for its data or settings"):
        compile_flow(kept(lambda batch, seen: None, lambda hp: {"prompts": SEEN["seen"]}))


def test_a_rate_must_leave_room_for_new_numbers():
    with pytest.raises(FlowError, match=r"ema\(1\)"):
        ema(1)


def test_a_write_inside_a_repeat_is_refused_and_a_read_is_not():
    def body(prompts, actor, reward, seen, write):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= seen.read(batch)
        if write:
            seen.write(batch, wins="add")
        return batch | keep(batch)

    @stage(gives="keep", rows="group")
    def keep(scores, tries):
        return tries < 3

    def repeated(write):
        @flow(keeps=lambda hp: SEEN)
        def flow_of(prompts, actor, reward, seen):
            batch = repeat(lambda fresh: body(fresh, actor, reward, seen, write), prompts, groups=2, tries=2)
            seen.write(batch | outcomes(batch), wins="add", tries="add")
            actor.update(batch, likelihood)

        return flow_of

    graph = compile_flow(repeated(False)).graph
    assert "repeat.<lambda>" in graph.before("seen.write")
    with pytest.raises(FlowError, match="stands in the body of a `repeat`"):
        compile_flow(repeated(True))


def test_a_table_that_is_never_read_or_never_written_gives_a_warning():
    for call, missing in ((lambda batch, seen: None, "reads or writes"), (MISTAKES["keeps-stale"], "writes")):
        problems = [problem for problem in trace(kept(call)).problems if problem.code == "keeps-unused"]
        assert [problem.severity for problem in problems] == ["warning"]
        assert missing in problems[0].message


def test_what_a_flow_keeps_is_part_of_its_graph_and_identity():
    read = kept(lambda batch, seen: seen.write(batch | seen.read(batch) | outcomes(batch), wins="add"))
    averaged = kept(lambda batch, seen: seen.write(batch | seen.read(batch) | outcomes(batch), wins=ema(0.9)))
    graphs = [compile_flow(each).graph for each in (read, averaged)]
    assert [unpack(pack(graph)) for graph in graphs] == graphs
    assert identity(graphs[0]) != identity(graphs[1])
    assert "keeps seen: a table by prompt_id, at first wins = 0, tries = 0" in str(graphs[0])
    assert "seen.read" in graphs[0].before("seen.write")


PAST = {"past": buffer(groups=4, evict="scores")}


def replayed(draw, put, keeps=lambda hp: PAST):
    """Return a flow that makes these calls on its buffer."""

    @flow(keeps=keeps)
    def replaying(prompts, actor, reward, past):
        old = draw(past)
        batch = actor.generate(prompts, samples=3, max_tokens=4)
        batch |= reward(batch)
        put(past, batch)
        both = concat(batch, old) if old is not None else batch
        actor.update(both, likelihood)

    return replaying


def drawn(past):
    return past.draw(groups=2)


def stored(past, batch):
    past.put(batch)


PAST_MISTAKES = {
    "keeps-draw": [
        (lambda past: past.draw(rows=2), stored),
        (lambda past: past.draw(groups=-1), stored),
        (lambda past: past.draw(groups=1.5), stored),
        (lambda past: past.draw(groups=2, weight=3), stored),
    ],
    "keeps-also": [(drawn, lambda past, batch: past.put(batch, also="scores"))],
    "keeps-written": [(drawn, lambda past, batch: [past.put(batch), past.put(batch)])],
    "keeps-order": [(drawn, lambda past, batch: [past.put(batch), past.draw()])],
    "keeps-stored": [
        (lambda past: past.draw(weight="spread"), stored),
        (lambda past: past.draw(strata="mask"), stored),
        (drawn, lambda past, batch: past.put(batch.drop("scores"))),
    ],
    "missing-column": [(drawn, lambda past, batch: past.put(batch, also=("spread",)))],
    "not-a-batch": [(drawn, lambda past, batch: past.put(3))],
}


@pytest.mark.parametrize(
    ("code", "draw", "put"), [(code, *calls) for code, many in PAST_MISTAKES.items() for calls in many]
)
def test_a_mistake_with_a_buffer_is_reported_at_its_line(code, draw, put):
    with pytest.raises(FlowError) as raised:
        compile_flow(replayed(draw, put))
    problem = next(problem for problem in raised.value.problems if problem.code == code)
    assert problem.place.path == __file__
    assert problem.remedy


@pytest.mark.parametrize(
    "settings",
    [{}, {"groups": 2, "rows": 3}, {"groups": 0}, {"rows": 2.0}, {"groups": 2, "max_age": 0}, {"evict": 3}],
)
def test_a_buffer_needs_one_bound(settings):
    with pytest.raises(FlowError, match="a buffer needs a bound"):
        buffer(**settings)


def test_a_draw_gives_what_the_put_below_it_stores():
    graph = compile_flow(replayed(drawn, lambda past, batch: past.put(batch, also=("completion",)))).graph
    draw, put = graph.by_name["past.draw"], graph.by_name["past.put"]
    names = [output.name for output in draw.outputs]
    assert names == [*(item.parameter for item in put.inputs), "age", "drawn", "group"]
    assert "completion" in names
    assert graph.axes[draw.makes].samples == 3
    assert unpack(pack(graph)) == graph
    assert "past.draw" in graph.before("past.put")
    assert "keeps past: a buffer of 4 groups, the lowest 'scores' leaves first" in str(graph)


def test_calls_of_a_buffer_change_no_random_numbers_of_other_calls():
    """The calls after them have the same numbers as without a buffer."""

    @flow
    def fresh(prompts, actor, reward):
        batch = actor.generate(prompts, samples=3, max_tokens=4)
        batch |= reward(batch)
        actor.update(batch, likelihood)

    one, other = compile_flow(replayed(drawn, stored)).graph, compile_flow(fresh).graph
    for node in other.nodes:
        assert one.by_name[node.name].call == node.call


def test_a_buffer_that_is_never_drawn_from_or_never_filled_gives_a_warning():
    def nothing(*_):
        return None

    for draw, put, missing in ((drawn, nothing, "puts into"), (nothing, stored, "draws from")):
        problems = [each for each in trace(replayed(draw, put)).problems if each.code == "keeps-unused"]
        assert [problem.severity for problem in problems] == ["warning"]
        assert missing in problems[0].message


def test_a_draw_inside_a_repeat_is_refused():
    @stage(gives="keep", rows="group")
    def keep(scores, group):
        return scores > 0

    @flow(keeps=lambda hp: PAST)
    def repeated(prompts, actor, reward, past):
        def body(fresh):
            past.draw()
            batch = actor.generate(fresh, samples=2, max_tokens=4)
            batch |= reward(batch)
            return batch | keep(batch)

        batch = repeat(body, prompts, groups=2, tries=2)
        past.put(batch)
        actor.update(batch, likelihood)

    with pytest.raises(FlowError, match="each try would draw the same rows"):
        compile_flow(repeated)


def test_a_wrong_call_of_a_buffer_is_named_as_one_of_a_table_is():
    for call in (lambda batch, past: past.drw(), lambda batch, past: past(batch)):
        with pytest.raises(FlowError) as raised:
            compile_flow(kept(call, lambda hp: {"seen": buffer(rows=4)}))
        (problem,) = raised.value.problems
        assert (problem.code, problem.expected) == ("unknown-verb", "seen.draw(), or seen.put(batch)")
