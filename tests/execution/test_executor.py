"""The in-process executor: overlap, deadlines, errors, and an empty store afterwards."""

import os
import sys
import threading
import time

import pytest
import torch
from hung_clock import HungClock
from keyed import keyed

from rlflow import RANK0, Batch, FlowError, StageError, flow, group, loss, row, scalar, stage, text
from rlflow.author.figures import Figure, Of
from rlflow.backends.null import Generator
from rlflow.compiler.graph.model import Column, Node, Op, Output
from rlflow.compiler.passes import plan
from rlflow.errors import Place, Stopped
from rlflow.execution.executor import Store
from rlflow.processes.watchdog.beside import Watchdog


@loss
def two_loss(new, one, two):
    return new.logprobs * (one + two)[:, None], {}


@loss
def one_loss(new, one):
    return new.logprobs * one[:, None], {}


def meeting(places, seconds=20):
    return threading.Barrier(places, timeout=seconds)


def with_stage(made, gives="one"):
    """Return a flow around one stage."""

    @flow
    def around(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= made(batch, gives=gives) if gives else made(batch)
        actor.update(batch, one_loss)

    return around


# -- overlap
# ------------------------------------------------------------------------------------------------------------


def test_independent_stages_run_at_the_same_time(world):
    meet = meeting(2)

    @stage(gives={"one": row("float32")})
    def one(scores):
        meet.wait()
        return scores

    @stage(gives={"two": row("float32")})
    def two(scores):
        meet.wait()
        return scores

    @flow
    def both(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= one(batch)
        batch |= two(batch)
        actor.update(batch, two_loss)

    run = world(both)
    outcome = run.compiled(3)
    spans = {span.node: span for span in outcome.spans}
    assert max(spans["one"].start, spans["two"].start) < min(spans["one"].end, spans["two"].end)


def test_a_reward_overlaps_a_forward_of_a_model(world, learner):
    meet = meeting(2)

    class Waiting(learner):
        def forward(self, batch, want=("logprobs",)):
            meet.wait()
            return super().forward(batch, want)

    @flow
    def beside(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch, gives="one")
        batch |= actor.logprobs(batch, gives="two")
        actor.update(batch, summed_loss)

    run = world(beside, trainer=Waiting)
    score = run.engine.scorers["reward"]
    run.engine.scorers["reward"] = lambda batch: (meet.wait(), score(batch))[1]
    run.compiled(3)


@loss
def summed_loss(new, one, two):
    return new.logprobs * one[:, None] * two, {}


def test_model_stages_do_not_overlap(world, learner):
    busy, seen = threading.Lock(), []

    class Alone(learner):
        def forward(self, batch, want=("logprobs",)):
            seen.append(busy.acquire(blocking=False))
            result = super().forward(batch, want)
            busy.release()
            return result

    @flow
    def turns(prompts, actor, critic, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch, gives="one")
        batch |= actor.logprobs(batch, gives="two")
        batch |= critic.logprobs(batch, gives="three")
        actor.update(batch, three_loss)

    run = world(turns, trainer=Alone)
    for _ in range(5):
        run.compiled(3)
    assert seen == [True] * 10


@loss
def three_loss(new, one, two, three):
    return new.logprobs * one[:, None] * two * three, {}


# -- errors
# ------------------------------------------------------------------------------------------------------------


def failure(world, made, gives="one", count=3):
    run = world(with_stage(made, gives))
    with pytest.raises(StageError) as caught:
        run.compiled(count)
    assert not run.executor.store.columns
    return caught.value


def test_a_stage_error_names_iteration_rows_shapes_and_cause(world):
    @stage(gives={"one": row("float32")})
    def breaks(scores, tokens, completion):
        raise KeyError("lost")

    run = world(with_stage(breaks))
    run.engine.iteration = 4
    with pytest.raises(StageError) as caught:
        run.compiled(3)
    error = caught.value
    assert (error.stage, error.iteration, error.rows, error.message) == ("breaks", 4, 6, "KeyError: 'lost'")
    assert isinstance(error.__cause__, KeyError)
    longest = int(error.columns["tokens"].rpartition(" ")[2].rstrip("]"))
    assert error.columns == {
        "scores": "row float32 [6]",
        "tokens": f"token int64 [6, {longest}]",
        "completion": "text [6]",
    }
    assert error.place.path == __file__
    assert not run.executor.store.columns


def test_an_eager_stage_error_names_the_same(world):
    @stage(gives={"one": row("float32")})
    def breaks(scores):
        raise KeyError("lost")

    flow = with_stage(breaks)
    with pytest.raises(StageError) as eager:
        world(flow).eager(3)
    with pytest.raises(StageError) as compiled:
        world(flow).compiled(3)
    assert str(eager.value) == str(compiled.value)


@pytest.mark.parametrize(
    ("gives", "result", "message"),
    [
        (
            row("float32"),
            lambda scores: scores[1:],
            r"column 'one': found shape \[5\], expected \[6\] \(row level\)",
        ),
        (row("float32"), lambda scores: torch.cat([scores, scores]), r"found shape \[12\], expected \[6\]"),
        (row("float32"), lambda scores: scores[:, None], r"found shape \[6, 1\], expected \[6\]"),
        (row("float32"), lambda scores: scores > 0, "found dtype bool, expected float32"),
        (row("int64"), lambda scores: scores, "found dtype float32, expected int64"),
        (row("float32"), lambda scores: None, "column 'one': found None, expected row float32"),
        (row("float32"), lambda scores: (scores, scores), "found 2 results, expected 1: one"),
        (row("float32"), lambda scores: (), "found 0 results, expected 1: one"),
    ],
)
def test_a_wrong_result_is_reported_with_found_and_expected(world, gives, result, message):
    made = stage(gives={"one": gives})(result)
    with pytest.raises(StageError, match=message):
        world(with_stage(made)).compiled(3)


def test_unequal_values_within_a_group_are_refused(world):
    @stage(gives={"one": group("float32")}, rows="group")
    def uneven(scores, group):
        return torch.arange(float(len(scores)))

    assert "found different values within a group" in failure(world, uneven).message


def test_a_scalar_column_needs_a_single_value(world):
    @stage(gives={"one": scalar("float32")}, dispatch=RANK0)
    def highest(scores):
        return scores

    error = failure(world, highest)
    assert "found shape [6], expected [] (scalar level)" in error.message


def test_text_columns_need_a_string_per_row(world):
    made = stage(gives={"one": text})(lambda scores: ["a"])
    with pytest.raises(StageError, match="column 'one': found 1 items, expected 6 strings"):
        world(with_stage(made)).compiled(3)


def test_token_columns_have_the_padded_shape_of_the_call(world):
    made = stage(gives="advantages")(lambda logprobs: logprobs[:, :-1])

    @loss
    def advantage_loss(new, advantages):
        return new.logprobs * advantages, {}

    @flow
    def f(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= actor.logprobs(batch)
        batch |= made(batch)
        actor.update(batch, advantage_loss)

    with pytest.raises(
        StageError, match=r"column 'advantages': found shape \[6, \d\], expected \[6, \d\] \(token level\)"
    ):
        world(f).compiled(3)


@pytest.mark.parametrize("lost", ["rows", "column"])
def test_a_backend_that_loses_rows_or_columns_is_an_error(world, lost, flows):
    class Losing(Generator):
        def generate(self, prompts, sampling, seeds):
            rows = super().generate(prompts, sampling, seeds)
            return rows.rows(range(len(rows) - 1)) if lost == "rows" else rows.drop("finish")

    with pytest.raises(StageError, match="found 14 rows" if lost == "rows" else "with finish") as caught:
        world(flows.remax, generator=Losing).compiled(5)
    assert caught.value.stage == "actor.generate"


def test_an_engine_that_loses_rows_is_an_error(world, flows):
    run = world(flows.remax)
    forward = run.engine.forward

    def losing(role, want, batch, terms):
        return forward(role, want, batch, terms).rows(range(len(batch) - 1))

    run.engine.forward = losing
    with pytest.raises(StageError, match="found 14 rows, expected 15") as caught:
        run.compiled(5)
    assert caught.value.stage == "actor.logprobs"


def test_scores_are_one_per_row(world, flows):
    run = world(flows.remax)
    run.engine.scorers["reward"] = lambda batch: (torch.zeros(len(batch) + 1), {})
    with pytest.raises(
        StageError,
        match=r"found scores of shape \[16\], expected \[15\]|found scores of shape \[6\], expected \[5\]",
    ):
        run.compiled(5)


def test_metrics_of_a_stage_are_means_over_masked_entries(world):
    @stage(gives={"one": row("float32")})
    def measured(scores, tokens, mask):
        noisy = torch.where(mask, 2.0, torch.nan)
        return scores, {
            "tokens": noisy,
            "rows": scores,
            "number": 3,
            "score_max": scores,
            "missing": torch.tensor([torch.nan]),
        }

    run = world(with_stage(measured))
    metrics = keyed(run.compiled(3).metrics)
    assert metrics["measured/tokens"] == 2.0
    assert metrics["measured/number"] == 3.0
    assert metrics["measured/rows"] < metrics["measured/score_max"]
    assert metrics["measured/missing"] != metrics["measured/missing"]


def test_padding_is_excluded_from_a_metric_without_a_mask(world):
    @stage(gives={"one": row("float32")})
    def measured(scores, tokens):
        return scores, {"ones": torch.nn.functional.pad(torch.ones(len(tokens), 1), (0, tokens.shape[1] - 1))}

    ones = world(with_stage(measured)).compiled(3).metrics[Figure(Of.STAGE, "ones", "measured")]
    assert 1 / 4 < ones <= 1.0


def test_a_metric_of_another_shape_is_refused(world):
    @stage(gives={"one": row("float32")})
    def measured(scores, tokens):
        return scores, {"odd": torch.ones(2, 2)}

    assert "metric 'odd': found shape [2, 2]" in failure(world, measured).message


def test_the_first_real_batch_decides_an_undeclared_column(world):
    @stage(gives="one")
    def own(scores):
        return scores * 2

    assert world(with_stage(own)).compiled(3).metrics[Figure(Of.UPDATE, "rows", "actor.update", "actor")] == 6

    made = stage(gives="one")(lambda scores: scores[:, None])
    with pytest.raises(
        StageError, match=r"column 'one': found shape \[6, 1\], expected one value, 6 rows, or rows × tokens"
    ):
        world(with_stage(made)).compiled(3)


def test_stages_may_write_into_their_inputs(world):
    @stage(gives={"one": row("float32")})
    def greedy(scores):
        scores.zero_()
        return scores

    seen = []

    @stage(gives={"two": row("float32")})
    def reads(scores, one):
        seen.append(scores.abs().sum().item())
        return scores

    @flow
    def f(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= greedy(batch)
        batch |= reads(batch)
        actor.update(batch, two_loss)

    run = world(f)
    run.compiled(3)
    run.eager(3)
    assert all(value > 0 for value in seen)


# -- stopping
# ------------------------------------------------------------------------------------------------------------


@flow
def twice(prompts, actor, critic, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch, gives="one")
    actor.update(batch, one_loss)
    batch |= actor.logprobs(batch)
    batch |= second(batch)
    critic.update(batch, later_loss)


@loss
def later_loss(new, logprobs, two):
    return new.logprobs * logprobs * two[:, None], {}


@pytest.mark.parametrize("where", ["generate", "update"])
def test_a_stop_during_an_update_lets_the_iteration_end(world, learner, where):
    class Stops(learner):
        def update(self, batch, loss, **options):
            run.executor.stopping = True
            return super().update(batch, loss, **options)

    class StopsEarlier(Generator):
        def generate(self, prompts, sampling, seeds):
            run.executor.stopping = True
            return super().generate(prompts, sampling, seeds)

    run = world(twice, **({"trainer": Stops} if where == "update" else {"generator": StopsEarlier}))
    if where == "update":
        outcome = run.compiled(3)
        assert {"actor.update", "actor.logprobs", "second", "critic.update"} <= {
            span.node for span in outcome.spans
        }
        assert {name: len(rows) for name, rows in run.learned.items()} == {"actor": 1, "critic": 1}
    else:
        with pytest.raises(Stopped):
            run.compiled(3)
        assert not run.learned


# -- deadlines
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stuck():
    """A function that does not return before the end of the test."""
    release = threading.Event()
    yield lambda: release.wait(60)
    release.set()


def test_a_stage_that_does_not_return_is_an_error_at_its_deadline(world, stuck):
    @stage(gives={"one": row("float32")}, timeout=0.2)
    def hangs(scores):
        stuck()
        return scores

    error = failure(world, hangs)
    assert (error.stage, error.rows, error.message) == ("hangs", 6, "no result after its deadline of 0.2 s")
    assert error.columns == {"scores": "row float32 [6]"}


def test_results_of_a_late_stage_are_dropped(world):
    release = threading.Event()

    @stage(gives={"one": row("float32")}, timeout=0.2)
    def late(scores):
        release.wait(60)
        return scores

    run = world(with_stage(late))
    with pytest.raises(StageError):
        run.compiled(3)
    release.set()
    assert run.queues.close(seconds=20)
    assert not run.executor.store.columns


def test_a_queue_continues_after_one_of_its_stages_is_lost(world, stuck):
    hang, clock = [True], HungClock()

    @stage(gives={"one": row("float32")}, on="actor", timeout=0.2)
    def sometimes(actor, scores):
        if hang.pop() if hang else False:
            clock.hung = True
            stuck()
        return scores

    run = world(with_stage(sometimes))
    run.executor.clock = clock
    with pytest.raises(StageError):
        run.compiled(3)
    clock.hung = False
    run.compiled(3)
    assert len(run.learned["actor"]) == 1


def test_waiting_for_a_queue_does_not_count_as_running(world):
    """The model queue has a limit of two but only one thread: the second stage waits longer than its timeout.
    While it runs, the clock stops.
    """
    never, ended = threading.Event(), []

    @stage(gives={"one": row("float32")}, on="actor")
    def holds(actor, scores):
        never.wait(0.7)
        ended.append(time.monotonic())
        return scores

    @stage(gives={"two": row("float32")}, on="actor", timeout=0.4)
    def waits(actor, scores):
        return scores

    @flow
    def both(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= holds(batch)
        batch |= waits(batch)
        actor.update(batch, two_loss)

    run = world(both)
    run.executor.clock = lambda: ended[0] if ended else time.monotonic()
    run.queues.room["model"] = 2
    spans = {span.node: span for span in run.compiled(2).spans}
    assert spans["waits"].start >= spans["holds"].end


def test_time_of_a_suspended_process_does_not_count_as_running(world):
    """The clock of a suspended process jumps between two readings."""

    class Clock:
        now, asked = 0.0, threading.Event()

        def __call__(self):
            self.asked.set()
            return self.now

    clock = Clock()

    @stage(gives={"one": row("float32")}, timeout=0.9)
    def short(scores):
        clock.now += 100.0
        clock.asked.clear()
        assert clock.asked.wait(60)
        return scores

    run = world(with_stage(short))
    run.executor.clock = clock
    run.compiled(3)


# -- exceptions that would end a program
# -------------------------------------------------------------------------------------------


class Ending(BaseException):
    """An exception that `except Exception` does not catch."""


def interrupt():
    raise KeyboardInterrupt


def own():
    raise Ending("x")


ENDINGS = {"sys.exit": lambda: sys.exit(0), "ctrl-C": interrupt, "own": own}


@pytest.mark.parametrize(
    ("how", "says"), [("sys.exit", "SystemExit: 0"), ("ctrl-C", "KeyboardInterrupt"), ("own", "Ending: x")]
)
def test_an_exception_that_would_end_the_program_is_a_stage_error(world, how, says):
    @stage(gives={"one": row("float32")})
    def ends(scores):
        ENDINGS[how]()

    error = failure(world, ends)
    line = ENDINGS[how].__code__.co_firstlineno + (how != "sys.exit")
    assert (error.stage, error.message) == (
        "ends",
        f"{says} (raised by {Place(__file__, line)}); a stage must not end the process: raise an error or return",
    )


def test_os_exit_in_a_stage_is_its_error_in_a_watched_run(world):
    @stage(gives={"one": row("float32")})
    def ends(scores):
        os._exit(0)

    watchdog_process = Watchdog.start()
    try:
        run = world(with_stage(ends))
        run.executor.heartbeat_page = watchdog_process.heartbeat_page
        with pytest.raises(StageError, match=r"ProcessExit: os\._exit\(0\) \(raised by .*test_executor.py"):
            run.compiled(3)
    finally:
        watchdog_process.close()


def test_an_eager_stage_passes_on_ctrl_c_and_not_an_exit(world):
    @stage(gives={"one": row("float32")})
    def ends(scores):
        ENDINGS[how]()

    how = "ctrl-C"
    with pytest.raises(KeyboardInterrupt):
        world(with_stage(ends)).eager(3)
    how = "sys.exit"
    with pytest.raises(StageError, match="SystemExit: 0"):
        world(with_stage(ends)).eager(3)


@pytest.mark.parametrize("leaving", [lambda: None, lambda: sys.exit(0), lambda: int("no")])
def test_a_forked_child_of_a_stage_does_not_continue_the_run(world, leaving):
    children = []

    @stage(gives={"one": row("float32")})
    def forks(scores):
        if (pid := os.fork()) == 0:
            leaving()
        else:
            children.append(pid)
        return scores

    run = world(with_stage(forks))
    for _ in range(2):
        run.compiled(3)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [
        int(leaving.__code__.co_names == ("int",))
    ] * 2
    assert len(run.learned["actor"]) == 2


# -- the store
# ------------------------------------------------------------------------------------------------------------


def test_a_closed_store_stays_empty():
    store = Store()
    node = Node(0, Op.DATA, "data", 0, outputs=(Output("scores", None, "scores"),))
    batch = Batch.of(scores=[1.0, 2.0])
    store.put(node, batch, ("scores",))
    assert (len(store.columns), store.peak_bytes) == (1, 8)
    store.close()
    store.put(node, batch, ("scores",))
    assert not store.columns


@stage(gives={"one": row("float32")})
def first(scores, tokens):
    return scores + tokens.sum(1)


@stage(gives={"two": row("float32")})
def second(one):
    return 2 * one


@flow
def in_line(prompts, actor, reward):
    """Each node waits for the one before it, so the contents of the store are known at any time."""
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= first(batch)
    batch |= second(batch)
    batch |= first(batch.drop("scores").rename(two="scores"), gives="three")
    actor.update(batch, third_loss)


@loss
def third_loss(new, three):
    return new.logprobs * three[:, None], {}


@loss
def second_loss(new, two):
    return new.logprobs * two[:, None], {}


def watched_store(monkeypatch):
    """Record the stored columns: (node, its columns with their bytes), in order."""
    puts, put = [], Store.put

    def watching(store, node, batch, names):
        put(store, node, batch, names)
        puts.append(
            (
                node.id,
                {
                    Column(node.id, o.name): batch.data[o.source].nbytes
                    for o in node.outputs
                    if o.name in names
                },
            )
        )

    monkeypatch.setattr(Store, "put", watching)
    return puts


def test_a_column_is_stored_until_its_last_reader_ends(world, monkeypatch):
    run, puts = world(in_line), watched_store(monkeypatch)
    made = plan(run.program)
    run.executor.run(made, run.stream.take(3))
    live, peak, done = {}, 0, set()
    for node, columns in puts:
        live |= columns  # its outputs are stored next to its inputs
        peak = max(peak, sum(live.values()))
        done.add(node)
        live = {
            column: size
            for column, size in live.items()
            if column in made.keep_until_end or not made.readers[column] <= done
        }
    assert run.executor.store.peak_bytes == peak
    assert peak < sum(size for _, columns in puts for size in columns.values())


@pytest.mark.parametrize("name", ["in_line", "warm"])
def test_the_last_node_leaves_only_its_inputs_and_recorded_columns(world, flows, learner, name):
    seen = []

    class Looking(learner):
        def update(self, batch, loss, **options):
            seen.append(set(run.executor.store.columns))
            return super().update(batch, loss, **options)

    run = world(in_line if name == "in_line" else getattr(flows, name), trainer=Looking)
    made = plan(run.program)
    for _ in range(3):  # the updates of ``warm`` start one after another
        seen.clear()
        run.executor.run(made, run.stream.take(3))
        run.engine.iteration += 1
    last = max(i for i in made.live if made.graph.nodes[i].op is Op.UPDATE)
    assert seen[-1] <= made.reads[last] | made.keep_until_end
    assert seen[-1] >= made.reads[last]


def test_an_undeclared_token_column_is_not_spread_over_a_group(world):
    per_token = stage(gives="baseline")(lambda tokens: tokens.float())

    @loss
    def baseline_loss(new, baseline):
        return new.logprobs * baseline[:, None], {}

    @flow
    def f(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        greedy = actor.generate(prompts, max_tokens=4, temperature=0)
        batch |= per_token(greedy)
        actor.update(batch, baseline_loss)

    with pytest.raises(FlowError, match="different rows"):
        world(f).compiled(3)
