"""From a flow and what is given to everything that a run needs: data, rewards, models, plan. What does not fit is said before any
model is loaded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rlflow
from rlflow import pretrained
from rlflow.author.flow import Flow
from rlflow.check.check import check
from rlflow.check.staleness import stale_problems
from rlflow.checkpoints.models import small_files
from rlflow.data.dataset import Dataset
from rlflow.data.prompts import Prompts
from rlflow.data.scorer import Judged
from rlflow.errors import FlowError, PlanError, listed
from rlflow.execution.ahead import Ahead
from rlflow.execution.engine import JUDGE, Engine, Scorer
from rlflow.execution.executor import Executor
from rlflow.execution.keeper import Keeper
from rlflow.execution.lanes import Lanes
from rlflow.explain.explanation import here
from rlflow.explain.fits import overlap_problems, stream_problems
from rlflow.extras import ask
from rlflow.given import rewards as bound
from rlflow.given.backends import Halves, Loaded, check_settings, device_of, halves, make_models, model_folder, numbers
from rlflow.given.dataset import open_dataset
from rlflow.given.flags import Given, refuse_stray
from rlflow.graph.model import Graph, Op, RoleUse
from rlflow.graph.wire import identity
from rlflow.passes import plan
from rlflow.placement import Placement, parse_pools, place
from rlflow.plan import Plan
from rlflow.rewards.process import in_worker
from rlflow.runs.canary import canary
from rlflow.runs.depends import Found, Sources, found, rewards_of, unreadable
from rlflow.runs.evaluate import Evaluation
from rlflow.runs.loop import Prepared
from rlflow.runs.parallel import lying
from rlflow.runs.recovery import Workers
from rlflow.runs.residents import resident
from rlflow.runs.screening import screened
from rlflow.runs.streaming import streaming
from rlflow.runs.trust import FILE_DIGEST, digest_of
from rlflow.trace.compile import Options, Program, all_nodes, compile_flow
from rlflow.training.protocols import Sampling
from rlflow.watch.reporter import Quiet
from rlflow.watch.secrets import redacted, telling
from rlflow.watchdog.beside import Watchdog

QUIET = Quiet()


@dataclass(frozen=True)
class Made:
    """What carries a run out: here, or on pools. ``reasons``: why scores are missing."""

    plan: Plan
    engine: Engine
    lanes: Lanes
    reasons: Callable[[], Mapping[str, str]]
    close: Callable[[], object]
    ahead: Ahead | None = None
    workers: Workers | None = None


Judge = Callable[[Graph, Found], Found]


def as_it_is(graph: Graph, found: Found) -> Found:
    """The judge of a run that is new."""
    return found


def prepare(
    flow: Flow, hp: Any, given: Given, note: Callable[[str], None] = QUIET.note, judge: Judge | None = as_it_is, begun: bool = False
) -> Prepared:
    """``note`` is told what takes long. ``judge`` is shown the graph and what the run depends on before any model is loaded, and may add
    digests that it knows; None where there will be no run to go on with. begun: whether the run has begun before, so that no record stops
    it. Raises FlowError and PlanError, and what ``judge`` raises."""
    if in_worker():
        raise PlanError.of("run-in-worker", "a reward's file starts a run when it is imported", found="a run inside a reward process",
                           expected="a file that only defines", remedy='put the run under: if __name__ == "__main__":')
    torch.set_num_threads(given.options.threads or torch.get_num_threads())
    report = check(flow, hp, Options(max(len(given.options.reward), 1)), with_variants=False)
    if report.program is None or not report.ok:
        raise FlowError(*report.errors)
    if given.options.ray_address is None:  # a cluster may have GPUs where its driver has none
        device_of(given.options.device)
    check_settings(model_uses(report.program.graph), given)
    check_fits(report.program, given)
    if given.options.pools:
        ask("ray", "cluster")
    data = open_dataset(flow, given)
    rewards, watchdog = bound.Rewards(given, data), Watchdog.start()
    try:
        program = compiled(flow, hp, given, data, rewards)
        prompts, held_out = screened(data, program.graph, model_uses(program.graph), given, note, begun)
        return _assembled(program, given, prompts, held_out, rewards, watchdog, note, judge)
    except BaseException:
        rewards.close()
        watchdog.close()
        raise


def check_fits(program: Program, given: Given) -> None:
    """Raises PlanError for pools, a staleness, chunks and memory that cannot be, before anything is loaded."""
    placement, staleness = placed(program.graph, given), given.options.staleness
    if problems := [*stale_problems(program, staleness), *overlap_problems(program.graph, placement, staleness)]:
        raise PlanError(*problems)
    made = make_plan(program, placement, given, None)
    if problems := list(stream_problems(made, staleness)):
        raise PlanError(*problems)


def make_plan(program: Program, placement: Placement | None, given: Given, evaluated: str | None) -> Plan:
    """All passes. ``evaluated``: the role that samples to be evaluated. Raises PlanError for memory that does not do."""
    graph, uses = program.graph, model_uses(program.graph)
    where = placement or here({use.name: _sampling(graph, use, evaluated) for use in uses})
    return resident(plan(program, placement, streaming(graph, uses, given)), uses, where, given, evaluated)


def _sampling(graph: Graph, use: RoleUse, evaluated: str | None) -> Halves:
    """What a role needs; the one that is evaluated samples, even where its flow never does."""
    half = halves(graph, use)
    return Halves(half.trainer, half.generator or use.name == evaluated)


def placed(graph: Graph, given: Given, evaluated: str | None = None, apart: Collection[str] = ()) -> Placement | None:
    """Where the halves of the roles go, None for one process. apart: pools that are known to be on several machines."""
    if not given.options.pools:
        refuse_stray([use.name for use in model_uses(graph)], given)
        return lying(None, graph, model_uses(graph), given)
    needs = {use.name: _sampling(graph, use, evaluated) for use in model_uses(graph)}
    placement = place(graph, needs, parse_pools(given.options.pools), {name: given.role(name) for name in needs})
    return lying(placement, graph, model_uses(graph), given, apart)


def compiled(flow: Flow, hp: Any, given: Given, data: Dataset, rewards: bound.Rewards) -> Program:
    """The flow traced with the columns that the data really have."""
    return compile_flow(flow, hp, compile_options(given, data, rewards))


def compile_options(given: Given, data: Judged, rewards: bound.Rewards) -> Options:
    return Options(max(len(given.options.reward), 1), rewards.reads, data.columns)


def _assembled(
    program: Program, given: Given, prompts: Prompts, held_out: Dataset, rewards: bound.Rewards, watchdog: Watchdog,
    note: Callable[[str], None], judge: Judge | None,
) -> Prepared:
    graph, options, training = program.graph, given.options, prompts.data
    uses = model_uses(graph)
    inputs = judge(graph, depends_on(program, given, training, held_out)) if judge else None
    files = {use.name: kept_files(use, given) for use in uses if use.trained}
    for folder in dict.fromkeys(folder for use in uses if (folder := model_folder(use, given))):
        if code := pretrained.named_code(folder):
            note(f"{folder} names Python code of its own, which is not run: {listed(code)}")
    updates = {use.name: expected_steps(graph, use, options.prompts, options.iterations) for use in uses}
    evaluated = evaluated_role(graph, held_out, rewards, given)
    if options.pools:
        from rlflow.runs import pools  # needs Ray

        traced = compile_options(given, training, rewards)
        made = pools.on_pools(program, given, training, traced, prompts, updates, evaluated, watchdog, note)
    else:
        made = _here(program, given, prompts, updates, rewards, evaluated)

    def stop() -> None:
        rewards.close()  # first: a lane may be waiting for a score
        made.close()

    return Prepared(made.plan, made.engine, Executor(made.engine, made.lanes), prompts, options,
                    evaluation(graph, uses, made.engine, held_out, rewards, given), recorded_settings(program, given), files, inputs,
                    made.reasons, stop, watchdog, made.ahead, made.workers, canary(uses, made.engine, training, given))


def depends_on(program: Program, given: Given, training: Dataset, held_out: Dataset) -> Found:
    """All that the run's numbers depend on beside its settings and its graph."""
    uses, graph = model_uses(program.graph), program.graph
    rewards = rewards_of([use for use in graph.roles if use.rewards], given)
    return found(Sources(Path(program.flow.place.path), uses, rewards, training, held_out), given)


def kept_files(use: RoleUse, given: Given) -> dict[str, bytes]:
    """The small files of a trained role's model folder, which checkpoints and final models get: from here on nothing needs the folder.
    Raises PlanError."""
    folder = model_folder(use, given)
    try:
        return {path.name: path.read_bytes() for path in small_files(folder)} if folder else {}
    except OSError as error:
        raise unreadable(folder, error) from error


def _here(
    program: Program, given: Given, prompts: Prompts, updates: Mapping[str, int], rewards: bound.Rewards, evaluated: str | None
) -> Made:
    """Everything in this process."""
    graph, options = program.graph, given.options
    uses = model_uses(graph)
    used = {node.role for node in all_nodes(graph.nodes)}
    scorers: dict[str, Scorer] = {use.name: rewards.scorer(use.name) for use in graph.roles if use not in uses and use.name in used}
    device = device_of(options.device)
    made = make_plan(program, None, given, evaluated)
    keeper = Keeper.of(made.residency)
    lanes = Lanes()  # a thread that ends, and its team with it, makes the models
    models = lanes.do("control", partial(make_models, graph, uses, given, device, updates, loaded=keeper.loaded))
    engine = Engine(models, scorers, options.seed, prompts.take, {slot.name: slot.initial for slot in graph.state},
                    reward_timeout=options.reward_timeout, keeper=keeper, dtype=numbers(options.dtype))
    scorers |= {use.name: bound.ModelScore(engine, use.name) for use in uses if use.rewards}
    lanes.do("control", partial(rewards.load_models, device))
    return Made(made, engine, lanes, rewards.reasons, lanes.close)


def evaluated_role(graph: Graph, held_out: Dataset, rewards: bound.Rewards, given: Given) -> str | None:
    """The role that is evaluated: the first trained language model, where there are held-out prompts and something can judge them."""
    role = next((use for use in model_uses(graph) if use.trained and use.head == "logprobs"), None)
    if role is None or not len(held_out) or given.options.backend == "null" or rewards.judge() is None:
        return None
    return role.name


def model_uses(graph: Graph) -> list[RoleUse]:
    """The roles that are models: all that are used, but for rewards that nobody trains."""
    used = {node.role for node in all_nodes(graph.nodes)}
    return [use for use in graph.roles if use.name in used and (use.trained or not use.rewards)]


def expected_steps(graph: Graph, use: RoleUse, prompts: int, iterations: int) -> int:
    """Optimizer steps of a role over the run, for schedules that end. A `repeat` that keeps fewer rows takes fewer."""
    steps = 0
    for node in graph.nodes:
        if node.op is Op.UPDATE and node.role == use.name:
            settings = dict(node.settings)
            axis = graph.axes[node.axis]
            pairs = axis.parent is None and axis.grouped  # data of pairs: two rows a record
            rows = prompts * max(axis.samples, 1) * (2 if pairs else 1)
            per_pass = -(-rows // int(str(settings["minibatch"]))) if settings["minibatch"] is not None else 1
            steps += per_pass * int(str(settings["epochs"])) * max(iterations - int(str(settings["after"])), 0)
    return steps


def evaluation(
    graph: Graph, uses: Sequence[RoleUse], engine: Engine, held_out: Dataset, rewards: bound.Rewards, given: Given
) -> Evaluation | None:
    """Accuracy on held-out prompts, where there are any and something can judge them."""
    name = evaluated_role(graph, held_out, rewards, given)
    scorer = rewards.judge() if name else None
    role = next((use for use in uses if use.name == name), None)
    if role is None or scorer is None:
        return None
    model = engine.models[role.name]
    if model.generator is None:
        model.generator = _generator_for_evaluation(graph, role, given, engine.keeper.loaded)
    prompts = held_out.batch(range(len(held_out)))
    node = next((n for n in all_nodes(graph.nodes) if n.op is Op.GENERATE and n.role == role.name), None)
    settings = dict(node.settings) if node else {}
    longest = int(prompts.data["tokens"].lengths.max()) if "tokens" in prompts else 0  # type: ignore[union-attr]
    stop = settings.get("stop", ())
    sampling = Sampling(1, int(str(settings.get("max_tokens", longest + 1))), stop=stop if isinstance(stop, tuple) else ())
    kept = prompts.select(*(name for name in prompts.columns if name not in ("tokens", "mask", "finish", "completion", "group", "chosen")))
    engine.scorers = {**engine.scorers, JUDGE: scorer}
    return Evaluation(engine, role.name, kept, sampling)


def _generator_for_evaluation(graph: Graph, role: RoleUse, given: Given, loaded: Loaded) -> Any:
    """A generator for a flow that never samples."""
    sampling = replace(graph, nodes=tuple(replace(node, op=Op.GENERATE) for node in graph.nodes if node.role == role.name))
    return make_models(sampling, [role], given, device_of(given.options.device), {}, loaded=loaded)[role.name].generator


def working_folder() -> str | None:
    """Where relative paths among the settings begin; None where that folder is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def recorded_settings(program: Program, given: Given) -> Mapping[str, Any]:
    """What settings.json says: everything needed to go on with the run, or to run the same again. A secret that is a default of the flow's
    own file is left to that file."""
    default = vars(program.flow.parameters.hp) if program.flow.parameters.hp is not None else {}
    hp = {name: value for name, value in program.graph.hp if not (telling(name) and value == default.get(name))}
    return redacted({
        "rlflow": rlflow.__version__, "torch": torch.__version__, "threads": torch.get_num_threads(), "started_in": working_folder(),
        "flow": program.flow.name, "file": program.flow.place.path, "graph": identity(program.graph),
        FILE_DIGEST: digest_of(Path(program.flow.place.path)),
        "hp": hp, "options": dataclasses.asdict(given.options),
        "values": {name: value for name, value in given.values.items() if not name.startswith("hp.")},
    })
