"""One flow, two ways to run it: eager flows on real batches and compiled flows learn from the same rows with
the same randomness.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from keyed import keyed
from sources import TESTS

from rlflow import RANK0, FlowError, StageError, flow, loss, row, scalar, stage
from rlflow.author.batch import Batch
from rlflow.author.load import load, load_flow
from rlflow.compiler.trace.compile import TraceOptions, compile_flow
from rlflow.errors import SkipIteration
from rlflow.execution.eager import Role

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not


@stage(gives="prompt")
def question(completion):
    return completion


@loss
def scored(new, scores, *, slope=3.0):
    return -new.logprobs * scores[:, None] * slope, {}


EMA = load(Path(__file__).parent / "ema.py")
NAMES = ["forgetful", "adaptive", "remax", "chancy", "warm", "clocked", "scheduled"]


def ran_both_ways(world, flow, iterations=3, count=5, **options):
    eager, compiled = world(flow, **options), world(flow, **options)
    for _ in range(iterations):
        eager.eager(count)
        compiled.compiled(count)
        assert not compiled.executor.store.columns
    return eager, compiled


@pytest.mark.parametrize("name", NAMES)
def test_eager_and_compiled_learn_from_the_same_random_rows(world, flows, name):
    eager, compiled = ran_both_ways(world, getattr(flows, name))
    assert eager.learned
    assert compiled.learned == eager.learned
    assert compiled.engine.state == eager.engine.state
    assert compiled.stream.position == eager.stream.position
    versions = {role: model.version for role, model in compiled.engine.models.items()}
    assert versions == {role: model.version for role, model in eager.engine.models.items()}


@pytest.mark.parametrize("settings", [{}, {"beta": 0.0}, {"samples": 3, "epochs": 2, "minibatch": 4}])
def test_ppo_runs_both_ways(world, settings):
    flow = load_flow("ppo")
    hp = dataclasses.replace(flow.parameters.hp, max_tokens=6, **settings)
    eager, compiled = ran_both_ways(world, flow, hp=hp)
    assert set(compiled.learned) == {"actor", "critic"}
    assert compiled.learned == eager.learned


@pytest.mark.parametrize("name", [*NAMES, "ppo"])
def test_eager_and_compiled_report_the_same_metrics(world, flows, eager_metrics, name):
    flow = load_flow("ppo") if name == "ppo" else getattr(flows, name)
    hp = dataclasses.replace(flow.parameters.hp, max_tokens=6) if name == "ppo" else None
    eager, compiled = world(flow, hp=hp), world(flow, hp=hp)
    for _ in range(3):
        eager.eager(4)
        assert compiled.compiled(4).metrics == pytest.approx(eager_metrics, nan_ok=True)


def test_another_seed_and_another_iteration_change_the_draws(world, flows):
    one, other = world(flows.chancy), world(flows.chancy, seed=1)
    for _ in range(2):
        one.compiled(4)
        other.compiled(4)
    seeds = [entry[1] for run in (one, other) for entry in run.learned["actor"]]
    assert len(set(seeds)) == 4


def test_state_persists_across_iterations(world, flows):
    run = world(flows.adaptive)
    bars = [run.engine.state["bar"]]
    for _ in range(3):
        run.compiled(5)
        bars.append(run.engine.state["bar"])
    assert bars[0] == 0.45
    assert len(set(bars)) == 4


def test_repeat_takes_fresh_prompts_until_it_has_enough_groups(world, flows):
    run = world(flows.adaptive)
    metrics = keyed(run.compiled(3).metrics)
    assert metrics["repeat.body/kept"] == 4
    assert metrics["repeat.body/tries"] > 1
    assert run.stream.position == 3 * metrics["repeat.body/tries"]


def test_an_iteration_without_rows_is_skipped_and_counts(world, flows):
    compiled, eager = world(flows.hopeless), world(flows.hopeless)
    with pytest.raises(SkipIteration, match="kept none of 6 groups in 3 tries"):
        compiled.compiled(2)
    assert eager.eager(2) is None
    assert eager.engine.iteration == 1
    assert compiled.stream.position == eager.stream.position == 6
    assert not compiled.executor.store.columns
    assert not eager.learned


def test_updates_start_after_their_iteration_of_warm_up(world, flows):
    run = world(flows.warm)
    counts = []
    for _ in range(3):
        before = len(run.learned.get("actor", []))
        run.compiled(3)
        counts.append(len(run.learned["actor"]) - before)
    assert counts == [1, 2, 3]


def test_a_generator_samples_with_the_newest_weights(world, flows):
    run = world(flows.warm)
    for _ in range(3):
        run.compiled(3)
        model = run.engine.models["actor"]
        assert model.sampled_version == model.generator.version == model.version - 1


def test_a_role_called_outside_a_flow_runs_at_once(world, flows, prompts):
    actor = Role("actor", world(flows.remax).engine)
    batch = actor.generate(prompts(0, 2), samples=2, max_tokens=3)
    assert batch["prompt"] == ["p0", "p0", "p1", "p1"]
    batch |= actor.logprobs(batch, gives=("logprobs", "entropy"))
    assert {"logprobs", "entropy"} <= set(batch.columns)


@pytest.mark.parametrize(
    ("use", "code"),
    [
        (lambda actor, batch: actor.generate(batch, max_tokens=2), "not-prompts"),
        (lambda actor, batch: actor.generate(batch, max_token=2), "unknown-setting"),
        (lambda actor, batch: actor.logprobs(batch.drop("tokens")), "missing-column"),
        (lambda actor, batch: actor.logprobs(batch, gives=("a", "b", "c")), "gives-count"),
        (lambda actor, batch: actor.logprobs(batch, gives="prompt_tokens"), "gives-prompt"),
        (lambda actor, batch: question(batch), "gives-prompt"),
        (lambda actor, batch: actor.logprobs("batch"), "not-a-batch"),
        (lambda actor, batch: actor.update(batch, print), "not-a-loss"),
    ],
)
def test_an_eager_call_reports_the_mistake_that_check_finds(world, flows, prompts, use, code):
    actor = Role("actor", world(flows.remax).engine)
    with pytest.raises(FlowError) as caught:
        use(actor, actor.generate(prompts(0, 2), samples=2, max_tokens=3))
    assert caught.value.problems[0].code == code
    assert caught.value.problems[0].place.path == __file__


def test_an_eager_update_needs_the_columns_of_its_loss_and_the_mask(world, flows, prompts):
    actor = Role("actor", world(flows.remax).engine)
    batch = actor.generate(prompts(0, 2), samples=2, max_tokens=3)
    with pytest.raises(FlowError, match="needs column 'logprobs'"):
        actor.update(batch, flows.policy_loss)
    batch |= actor.logprobs(batch)
    batch |= actor.logprobs(batch, gives="advantages")
    with pytest.raises(FlowError, match="no column 'mask'"):
        actor.update(batch.drop("mask"), flows.policy_loss)


@pytest.mark.parametrize("together", [False, True])
def test_a_trainer_gets_settings_of_the_update_and_of_the_loss_once(world, learner, together):
    given = []

    class Noting(learner):
        def update(self, batch, loss, **options):
            given.append(options)
            return super().update(batch, loss, **options)

    @loss
    def capped(new, *, mean="rows", after=7, cap=1.0, **more):
        return -new.logprobs * cap, {}

    @flow
    def f(prompts, actor, reward):
        batch = actor.generate(prompts, max_tokens=3)
        batch |= reward(batch)
        actor.update(batch, (capped, scored) if together else capped, mean=2, cap=0.5)

    ran_both_ways(world, f, iterations=1, trainer=Noting)
    own = {"cap": 0.5, "slope": 3.0} if together else {"cap": 0.5}
    assert [{name: value for name, value in options.items() if name != "seed"} for options in given] == [
        {"epochs": 1, "minibatch": None, "mean": 2, **own}
    ] * 2


def test_state_is_restored_after_a_failed_eager_iteration(world, flows, learner):
    class Broken(learner):
        def update(self, batch, loss, **options):
            raise ZeroDivisionError("no steps")

    run = world(flows.adaptive, trainer=Broken)
    with pytest.raises(StageError, match="no steps"):
        run.eager(5)
    assert run.engine.state == {"bar": 0.45}
    assert run.engine.iteration == 0


CLOCKS = ("odd", "enough", "schedule", "actor.update", "actor.update#2")


def test_every_kind_of_call_reads_the_iteration_and_the_progress(world, flows):
    run = world(flows.clocked)
    run.engine.iterations = 8
    for iteration in range(3):
        metrics = keyed(run.compiled(5).metrics)
        assert [metrics[f"{name}/iteration"] for name in CLOCKS] == [iteration] * 5
        assert [metrics[f"{name}/progress"] for name in ("enough", "schedule")] == [iteration / 8] * 2


@pytest.mark.parametrize("name", ["iteration", "progress", "prompt_id"])
def test_only_the_run_gives_its_reserved_columns(world, flows, prompts, name):
    actor = Role("actor", world(flows.remax).engine)
    batch = actor.generate(prompts(0, 2), max_tokens=3)
    with pytest.raises(FlowError, match=f"gives '{name}', but the run adds this column"):
        actor.logprobs(batch, gives=name)


# -- computed settings
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controlled", [True, False])
def test_settings_follow_state_and_progress_in_plans_and_eagerly(world, controlled):
    hp = EMA.EMA(controlled=controlled)
    eager, compiled = world(EMA.ema, hp=hp), world(EMA.ema, hp=hp)
    eager.engine.iterations = compiled.engine.iterations = 4
    heats, states = [], []
    for iteration in range(4):
        states.append(compiled.engine.state.get("heat", 1.2 - 0.1 * iteration))
        eager.eager(5)
        metrics = keyed(compiled.compiled(5).metrics)
        heats.append(metrics["above/temperature"])
        assert metrics["actor.update/bonus"] == pytest.approx(0.05 * (1 - iteration / 4))
    assert heats == pytest.approx(states)
    assert len(set(heats)) > 1
    assert compiled.learned == eager.learned
    assert compiled.engine.state == eager.engine.state


@stage(gives={"wild": scalar("float32")}, dispatch=RANK0)
def wild(iteration, *, by):
    return torch.tensor(by) * iteration


@stage(gives="advantages")
def scaled(mask, scores, *, factor: float):
    return mask * scores[:, None] * factor


@loss
def scaled_loss(new, advantages, *, factor: float = 1.0):
    return -new.logprobs * advantages * factor, {}


def wild_flow(by, of):
    @flow
    def unbounded(prompts, actor, reward):
        number = wild(prompts, by=by)["wild"]
        batch = actor.generate(
            prompts, max_tokens=3, **({of: number} if of in ("temperature", "top_p") else {})
        )
        batch |= reward(batch)
        batch |= scaled(batch, factor=number if of == "factor" else 1.0)
        actor.update(batch, scaled_loss, factor=number if of == "loss" else 1.0)

    return unbounded


@pytest.mark.parametrize(
    ("by", "of", "node", "says"),
    [
        (
            -1.0,
            "temperature",
            "actor.generate",
            "setting 'temperature': found -1, expected a number of at least 0",
        ),
        (2.0, "top_p", "actor.generate", "setting 'top_p': found 2, expected a number above 0 and at most 1"),
        (float("inf"), "factor", "scaled", "setting 'factor': found inf, expected a finite number"),
        (float("nan"), "loss", "actor.update", "setting 'factor': found nan, expected a finite number"),
    ],
)
def test_a_computed_setting_out_of_its_range_is_an_error_at_its_line(world, by, of, node, says):
    compiled, eager = (world(wild_flow(by, of)) for _ in range(2))
    compiled.engine.iteration = eager.engine.iteration = 1
    with pytest.raises(StageError) as caught:
        compiled.compiled(3)
    assert says in str(caught.value)
    assert caught.value.stage == node
    assert caught.value.place.path == __file__
    with pytest.raises(FlowError) as other:
        eager.eager(3)
    assert says in str(other.value)
    assert other.value.problems[0].place == caught.value.place


def test_a_flag_replaces_a_computed_setting():
    sampling = {"actor.generate": {"temperature": 0.7}}
    generate = compile_flow(EMA.ema, options=TraceOptions(sampling=sampling)).graph.by_name["actor.generate"]
    assert [item.parameter for item in generate.inputs] == ["prompt_tokens"]
    assert generate.settings.temperature == 0.7
    generate = compile_flow(
        EMA.ema, options=TraceOptions(sampling={"actor.generate": {"top_k": 3}})
    ).graph.by_name["actor.generate"]
    assert [item.parameter for item in generate.inputs] == ["prompt_tokens", "setting.temperature"]
    assert generate.settings.temperature is None


@stage(gives={"level": scalar("float32")}, dispatch=RANK0)
def raised(level):
    return level + 1


@stage(gives={"seen": scalar("float32")}, dispatch=RANK0)
def seen(scores, *, value):
    return scores.sum() * 0 + value, {"value": value}


@flow(state=lambda hp: {"level": 0.0})
def stepwise(prompts, actor, reward):
    batch = actor.generate(prompts, max_tokens=3)
    batch |= reward(batch)
    batch |= raised(batch)
    raised(batch)
    batch |= seen(batch, value=batch["level"])
    batch |= scaled(batch, factor=batch["iteration"])
    actor.update(batch, scaled_loss, factor=batch["seen"])


def test_state_as_a_setting_has_its_newest_value_in_any_batch(world, eager_metrics):
    compiled, eager = world(stepwise), world(stepwise)
    for iteration in range(2):
        metrics = keyed(compiled.compiled(3).metrics)
        eager.eager(3)
        assert metrics["seen/value"] == keyed(eager_metrics)["seen/value"] == 2 * iteration + 2
    assert compiled.learned == eager.learned


def test_an_eager_group_loss_with_incomplete_groups_is_refused(world, flows, prompts):
    torn = load(TESTS / "compiler" / "check" / "fixtures" / "torn_groups.py")
    actor = Role("actor", world(flows.remax).engine)
    batch = actor.generate(prompts(0, 2), samples=2, max_tokens=3)
    more = Batch.of(
        scores=[1.0, 0.0, 1.0, 1.0], right=[True, False, True, True], kinds={"right": row("bool")}
    )
    batch |= Batch(batch.axis, more.data)
    with pytest.raises(FlowError, match=r"'over_groups' works on groups, but where='right' may select parts"):
        actor.update(batch, (torn.likelihood, torn.over_groups), where=(None, "right"))
