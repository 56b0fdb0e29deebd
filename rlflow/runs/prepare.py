"""From a flow and what is given to everything that a run needs: data, rewards, models, plan. What does not fit is said before any
model is loaded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rlflow
from rlflow import pretrained
from rlflow.author.flow import Flow
from rlflow.binding import rewards as bound
from rlflow.binding.backends import device_of, numbers
from rlflow.binding.dataset import open_dataset
from rlflow.binding.models import Loaded, make_models
from rlflow.binding.roles import BoundRole, Halves, Roles, folders, model_uses
from rlflow.binding.roles import bound as bound_roles
from rlflow.check.check import check
from rlflow.check.staleness import stale_problems
from rlflow.checkpoints.models import small_files
from rlflow.config.flags import RunConfig, refuse_stray
from rlflow.config.options import Options as RunOptions
from rlflow.data.dataset import Dataset
from rlflow.data.prompts import Prompts
from rlflow.data.scorer import Judged
from rlflow.errors import FlowError, PlanError, Problem, listed
from rlflow.execution.engine import JUDGE, Engine, Scorer
from rlflow.execution.executor import Executor
from rlflow.execution.lanes import Lanes
from rlflow.execution.lookahead import Ahead
from rlflow.explain.explanation import here
from rlflow.explain.fits import crowded, idle_ranks, overlap_problems, stream_problems, too_many_rows, unused_pools
from rlflow.explain.sizes import Assumed, Sizes
from rlflow.extras import ask
from rlflow.graph.lineage import expected_rows
from rlflow.graph.model import Graph, Op, RoleUse
from rlflow.graph.wire import identity
from rlflow.memory.inputs import resident
from rlflow.memory.mover import MemoryMover
from rlflow.passes import plan
from rlflow.placement import Placement, parse_pools, place
from rlflow.plan import Plan
from rlflow.rewards.process import in_worker
from rlflow.rewards.spec import parse_reward, readers
from rlflow.runs.canary import canary
from rlflow.runs.depends import Dependencies, Sources, found, rewards_of, unreadable
from rlflow.runs.evaluate import Evaluation
from rlflow.runs.loop import RunContext
from rlflow.runs.parallelism import lying
from rlflow.runs.recovery import Workers
from rlflow.runs.screening import screened
from rlflow.runs.streaming import streaming
from rlflow.runs.trust import FILE_DIGEST, digest_of
from rlflow.trace.compile import Program, TraceOptions, all_nodes, compile_flow, trace
from rlflow.training.protocols import Sampling
from rlflow.watch.reporter import Quiet
from rlflow.watch.secrets import redacted, telling
from rlflow.watchdog.beside import Watchdog

QUIET = Quiet()


@dataclass(frozen=True)
class Runtime:
    """What carries a run out: here, or on pools. ``reasons``: why scores are missing."""

    plan: Plan
    engine: Engine
    lanes: Lanes
    reasons: Callable[[], Mapping[str, str]]
    close: Callable[[], object]
    ahead: Ahead | None = None
    workers: Workers | None = None


Judge = Callable[[Graph, Dependencies], Dependencies]


def as_it_is(graph: Graph, found: Dependencies) -> Dependencies:
    """The judge of a run that is new."""
    return found


def prepare(
    flow: Flow, hp: Any, given: RunConfig, note: Callable[[str], None] = QUIET.note, judge: Judge | None = as_it_is, begun: bool = False
) -> RunContext:
    """``note`` is told what takes long. ``judge`` is shown the graph and what the run depends on before any model is loaded, and may add
    digests that it knows; None where there will be no run to go on with. begun: whether the run has begun before, so that no record stops
    it. Raises FlowError and PlanError, and what ``judge`` raises."""
    if in_worker():
        raise PlanError.of("run-in-worker", "a reward's file starts a run when it is imported", found="a run inside a reward process",
                           expected="a file that only defines", remedy='put the run under: if __name__ == "__main__":')
    torch.set_num_threads(given.options.threads or torch.get_num_threads())
    report = check(flow, hp, TraceOptions(max(len(given.options.reward), 1)), with_variants=False)
    if report.program is None or not report.ok:
        raise FlowError(*report.errors)
    if given.options.ray_address is None:  # a cluster may have GPUs where its driver has none
        device_of(given.options.device)
    roles = bound_roles(report.program.graph, given)
    for warning in check_fits(report.program, roles, given):
        note(str(warning))
    if given.options.pools:
        ask("ray", "cluster")
    data = open_dataset(flow, given)
    rewards, watchdog = bound.Rewards(given, data), Watchdog.start()
    try:
        program = compiled(flow, hp, given, data, rewards)
        for warning in warnings(flow, hp, compile_options(given, data, rewards)):
            note(str(warning))
        prompts, held_out = screened(data, program.graph, roles, given, note, begun)
        if 0 < (there := len(prompts.data)) < (taken := given.options.prompts):
            note(f"{data.name} has {there} record{'s' * (there != 1)} to train on, and an iteration takes {taken}: each stands in it "
                 f"{taken / there:.3g} times (--prompts)")
        return _assembled(program, roles, given, prompts, held_out, rewards, watchdog, note, judge)
    except BaseException:
        rewards.close()
        watchdog.close()
        raise


def warnings(flow: Flow, hp: Any, options: TraceOptions) -> list[Problem]:
    """What `check` warns of in the flow."""
    return [problem for problem in trace(flow, hp, options).problems if problem.severity == "warning"]


def check_fits(program: Program, roles: Roles, given: RunConfig) -> list[Problem]:
    """What can hardly be meant of pools. Raises PlanError for rows, pools, a staleness, chunks and memory that cannot be, before anything
    is loaded."""
    sizes = Sizes.of(program.graph, Assumed(given.options.prompts))
    if problems := list(too_many_rows(sizes)):
        raise PlanError(*problems)
    placement, staleness = placed(program.graph, roles, given), given.options.staleness
    if problems := [*stale_problems(program, staleness), *overlap_problems(program.graph, placement, staleness)]:
        raise PlanError(*problems)
    made = make_plan(program, roles, placement, given, None)
    if problems := list(stream_problems(made, staleness)):
        raise PlanError(*problems)
    if placement is None:
        return []
    here_alone = given.options.ray_address is None
    return [*idle_ranks(made, sizes), *unused_pools(placement), *(crowded(placement, os.cpu_count() or 1) if here_alone else ())]


def make_plan(program: Program, roles: Roles, placement: Placement | None, given: RunConfig, evaluated: str | None) -> Plan:
    """All passes. ``evaluated``: the role that samples to be evaluated. Raises PlanError for memory that does not do."""
    where = placement or here(needs(roles, evaluated))
    return resident(plan(program, placement, streaming(program.graph, roles, given)), roles, where, given, evaluated)


def needs(roles: Roles, evaluated: str | None) -> dict[str, Halves]:
    """What each role needs; the one that is evaluated samples, even where its flow never does."""
    return {name: Halves(role.needs.trainer, role.needs.generator or name == evaluated) for name, role in roles.items()}


def placed(graph: Graph, roles: Roles, given: RunConfig, evaluated: str | None = None, apart: Collection[str] = ()) -> Placement | None:
    """Where the halves of the roles go, None for one process. apart: pools that are known to be on several machines."""
    if not given.options.pools:
        refuse_stray(list(roles), given)
        return lying(None, graph, roles, given.options)
    placement = place(graph, needs(roles, evaluated), parse_pools(given.options.pools), {name: given.role(name) for name in roles})
    return lying(placement, graph, roles, given.options, apart)


def compiled(flow: Flow, hp: Any, given: RunConfig, data: Dataset, rewards: bound.Rewards) -> Program:
    """The flow traced with the columns that the data really have."""
    return compile_flow(flow, hp, compile_options(given, data, rewards))


def compile_options(given: RunConfig, data: Judged, rewards: bound.Rewards) -> TraceOptions:
    return TraceOptions(max(len(given.options.reward), 1), rewards.reads, data.columns,
                   readers(map(parse_reward, given.options.reward)))  # fmt: skip


def _assembled(
    program: Program, roles: Roles, given: RunConfig, prompts: Prompts, held_out: Dataset, rewards: bound.Rewards, watchdog: Watchdog,
    note: Callable[[str], None], judge: Judge | None,
) -> RunContext:
    graph, options, training = program.graph, given.options, prompts.data
    inputs = judge(graph, depends_on(program, roles, given, training, held_out)) if judge else None
    files = {name: kept_files(role.folder) for name, role in roles.items() if role.use.trained}
    for folder in folders(roles.values()):
        if code := pretrained.named_code(folder):
            note(f"{folder} names Python code of its own, which is not run: {listed(code)}")
    updates = {name: expected_steps(graph, role.use, options.prompts, options.iterations) for name, role in roles.items()}
    evaluated = evaluated_role(graph, held_out, rewards, given)
    if options.pools:
        from rlflow.runs import pools  # needs Ray

        traced = compile_options(given, training, rewards)
        made = pools.on_pools(program, roles, given, training, traced, prompts, updates, evaluated, watchdog, note)
    else:
        made = _here(program, roles, given, prompts, updates, rewards, evaluated)

    def stop() -> None:
        rewards.close()  # first: a lane may be waiting for a score
        made.close()

    return RunContext(made.plan, made.engine, Executor(made.engine, made.lanes), prompts, options,
                    evaluation(graph, roles, made.engine, held_out, rewards, given), recorded_settings(program, given), files, inputs,
                    made.reasons, stop, watchdog, made.ahead, made.workers, canary(roles, made.engine, training, options),
                    rewards.heard_by)  # fmt: skip


def depends_on(program: Program, roles: Roles, given: RunConfig, training: Dataset, held_out: Dataset) -> Dependencies:
    """All that the run's numbers depend on beside its settings and its graph."""
    rewards = rewards_of([use for use in program.graph.roles if use.rewards], given)
    return found(Sources(Path(program.flow.place.path), roles, rewards, training, held_out), given)


def kept_files(folder: Path | None) -> dict[str, bytes]:
    """The small files of a trained role's model folder, which checkpoints and final models get: from here on nothing needs the folder.
    Raises PlanError."""
    try:
        return {path.name: path.read_bytes() for path in small_files(folder)} if folder else {}
    except OSError as error:
        raise unreadable(folder, error) from error


def _here(
    program: Program, roles: Roles, given: RunConfig, prompts: Prompts, updates: Mapping[str, int], rewards: bound.Rewards,
    evaluated: str | None,
) -> Runtime:
    """Everything in this process."""
    graph, options = program.graph, given.options
    used = {node.role for node in all_nodes(graph.nodes)}
    judges = [use.name for use in graph.roles if use.name not in roles and use.name in used]
    scorers: dict[str, Scorer] = {name: rewards.scorer(name) for name in judges}
    device = device_of(options.device)
    made = make_plan(program, roles, None, given, evaluated)
    keeper = MemoryMover.of(made.residency)
    lanes = Lanes()  # a thread that ends, and its team with it, makes the models
    models = lanes.do("control", partial(make_models, roles.values(), options, device, updates, loaded=keeper.loaded))
    engine = Engine(models, scorers, options.seed, prompts.take, {slot.name: slot.initial for slot in graph.state},
                    reward_timeout=options.reward_timeout, keeper=keeper, dtype=numbers(options.dtype))
    scorers |= {name: bound.ModelScore(engine, name) for name, role in roles.items() if role.use.rewards}
    lanes.do("control", partial(rewards.load_models, device))
    return Runtime(made, engine, lanes, rewards.reasons, lanes.close)


def evaluated_role(graph: Graph, held_out: Dataset, rewards: bound.Rewards, given: RunConfig) -> str | None:
    """The role that is evaluated: the first trained language model, where there are held-out prompts and something can judge them."""
    role = next((use for use in model_uses(graph) if use.trained and use.head == "logprobs"), None)
    if role is None or not len(held_out) or given.options.backend == "null" or rewards.judge() is None:
        return None
    return role.name


def expected_steps(graph: Graph, use: RoleUse, prompts: int, iterations: int) -> int:
    """Optimizer steps of a role over the run, for schedules that end. A `repeat` that keeps fewer rows takes fewer."""
    steps, expected = 0, expected_rows(graph, prompts, repeats="prompts")
    for node in graph.nodes:
        if node.op is Op.UPDATE and node.role == use.name:
            settings = dict(node.settings)
            rows = expected[node.axis]
            per_pass = -(-rows // int(str(settings["minibatch"]))) if settings["minibatch"] is not None else 1
            steps += per_pass * int(str(settings["epochs"])) * max(iterations - int(str(settings["after"])), 0)
    return steps


def evaluation(
    graph: Graph, roles: Roles, engine: Engine, held_out: Dataset, rewards: bound.Rewards, given: RunConfig
) -> Evaluation | None:
    """Accuracy on held-out prompts, where there are any and something can judge them."""
    name = evaluated_role(graph, held_out, rewards, given)
    scorer = rewards.judge() if name else None
    role = roles.get(name) if name else None
    if role is None or scorer is None:
        return None
    model = engine.models[role.name]
    if model.generator is None:
        model.generator = _generator_for_evaluation(role, given.options, engine.keeper.loaded)
    prompts = held_out.batch(range(len(held_out)))
    node = next((n for n in all_nodes(graph.nodes) if n.op is Op.GENERATE and n.role == role.name), None)
    settings = dict(node.settings) if node else {}
    longest = int(prompts.data["tokens"].lengths.max()) if "tokens" in prompts else 0  # type: ignore[union-attr]
    stop = settings.get("stop", ())
    sampling = Sampling(1, int(str(settings.get("max_tokens", longest + 1))), stop=stop if isinstance(stop, tuple) else ())
    kept = prompts.select(*(name for name in prompts.columns if name not in ("tokens", "mask", "finish", "completion", "group", "chosen")))
    engine.scorers = {**engine.scorers, JUDGE: scorer}
    return Evaluation(engine, role.name, kept, sampling)


def _generator_for_evaluation(role: BoundRole, options: RunOptions, loaded: Loaded) -> Any:
    """A generator for a flow that never samples."""
    return make_models([role], options, device_of(options.device), {}, lambda role: Halves(False, True), loaded)[role.name].generator


def working_folder() -> str | None:
    """Where relative paths among the settings begin; None where that folder is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def recorded_settings(program: Program, given: RunConfig) -> Mapping[str, Any]:
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
