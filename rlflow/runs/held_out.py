"""Which role of a run is evaluated on held-out prompts, and with what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlflow.author.batch import Batch
from rlflow.author.node_options import GenerateOptions
from rlflow.compiler.graph.model import Graph, Op
from rlflow.compiler.plan import Plan
from rlflow.compiler.trace.compile import all_nodes
from rlflow.compiler.trace.evaluation import RESPONSES
from rlflow.config.flags import NULL
from rlflow.config.options import Options
from rlflow.config.roles.backends import device_of
from rlflow.config.roles.bound import BoundRole, Halves, Roles
from rlflow.config.roles.loaded_models import LoadedModels, make_models
from rlflow.config.roles.prompt_room import room
from rlflow.config.roles.rewards import Rewards
from rlflow.data.dataset import Dataset
from rlflow.data.faults import refused, spoken
from rlflow.errors import PlanError
from rlflow.execution.engine import Engine, Model
from rlflow.execution.executor import Executor
from rlflow.execution.lanes import Lanes
from rlflow.runs.evaluate import Evaluation, FlowEvaluation, HeldOutSet
from rlflow.runs.guards import in_order
from rlflow.runs.planning import evaluation_role, evaluation_roles, policies
from rlflow.training.protocols import Sampling

# how a role samples that holds in evaluation
PASSED = ("top_p", "top_k", "stop", "stop_token_ids", "min_tokens", "skip_special_tokens")


@dataclass(frozen=True)
class HeldOut:
    """The records of a run that nothing is trained on."""

    data: Dataset  # held out of the training data
    sets: Mapping[str, Dataset] = field(default_factory=dict)  # of --eval, by name

    @property
    def longest(self) -> int:
        """Tokens of the longest response, 0 where there are none: what a flow that never samples may sample
        to be evaluated."""
        for data in (self.data, *self.sets.values()):
            tokens = (
                data.batch(range(len(data))).data.get("tokens")
                if data.shape != "prompts" and len(data)
                else None
            )
            if tokens is not None:
                return int(tokens.lengths.max())  # type: ignore[union-attr]
        return 0

    def judged(self, rewards: Rewards) -> tuple[HeldOutSet, ...]:
        """The sets that something can judge, as rows. Raises PlanError for a set of ``--eval`` that nothing
        can."""
        judge = rewards.judge() if len(self.data) else None
        own = (HeldOutSet(questions(replace(self.data, numbered=True)), judge),) if judge is not None else ()
        return (
            *own,
            *(
                HeldOutSet(questions(data), rewards.judge_of_set(name, data), name)
                for name, data in self.sets.items()
            ),
        )


def questions(data: Dataset) -> Batch:
    """The records as prompts, each once, without responses."""
    prompts = data.batch(range(len(data)))
    if prompts.axis.grouped:  # pairs: a prompt stands in two rows
        prompts = prompts.rows(prompts.axis.heads)
    return prompts.select(*(name for name in prompts.columns if name not in RESPONSES))


def usable_sets(
    graph: Graph,
    roles: Roles,
    options: Options,
    opened: Callable[[list[str]], Mapping[str, Dataset]],
    note: Callable[[str], None],
    begun: bool,
) -> dict[str, Dataset]:
    """The sets of ``--eval`` that are measured, without the records that no model can be given. ``note`` gets
    these records, and a warning for each set with prompts that hold control tokens. ``opened``: gives the
    sets by name, told the names of roles. Raises PlanError for a flow that evaluates by itself, and for
    records that cannot be used unless these are to be left out, or the run has ``begun``."""
    if options.eval and graph.evaluation is not None:
        raise PlanError.of(
            "eval-own",
            "the flow has an evaluation of its own, which takes prompts held out of the data alone",
            found=f"--eval {options.eval[0]}",
            expected="no --eval, as the flow alone says what counts as an answer",
            remedy="leave --eval out here, and measure what the trained model itself answers afterwards: "
            f"rlflow eval RUN/final/ROLE --eval {options.eval[0]}",
        )
    if not options.eval or options.backend == NULL:
        if options.eval:
            note("the sets of --eval are opened by no run on the null backend, which has no model to measure")
        return {}
    sets: dict[str, Dataset] = {}
    for name, data in opened([use.name for use in graph.roles]).items():
        limited = replace(data, room=room(graph, roles, (), False))
        left_out = limited.faulty(range(len(limited)))
        faults = in_order([*data.faults, *left_out.values()])
        if faults and (len(left_out) == len(data) or not begun and options.bad_records == "stop"):
            raise refused(data.name, faults, len(data) + len(data.faults), limited.room)
        if faults:
            note(f"{len(faults)} records of the held-out set '{name}' are left out: {spoken(faults)}")
        sets[name] = replace(
            limited, records=[record for place, record in enumerate(data.records) if place not in left_out]
        )
        if templated := sets[name].templated(f"the held-out set '{name}'"):
            note(str(templated))
    return sets


def evaluated_role(graph: Graph, roles: Roles, sets: Sequence[HeldOutSet], options: Options) -> str | None:
    """The first role that is evaluated, where there are held-out prompts that something can judge."""
    return evaluation_role(graph, roles, options) if sets else None


def evaluations(
    plan: Plan,
    roles: Roles,
    first: str,
    engine: Engine,
    lanes: Lanes,
    held_out: HeldOut,
    sets: tuple[HeldOutSet, ...],
    options: Options,
) -> Evaluation:
    """Measure the accuracy of the role ``first``, and of each other role that samples from the prompts of the
    data. Figures name the role where the flow trains several."""
    names = [first, *(name for name in evaluation_roles(plan.graph, roles, options) if name != first)]
    own, *others = (evaluation(plan, roles[name], engine, lanes, held_out, sets, options) for name in names)
    return replace(own, others=tuple(others), named=len(policies(roles)) > 1)


def flow_evaluation(executor: Executor, plan: Plan, held_out: Dataset) -> FlowEvaluation | None:
    """The flow's own evaluation; None where it has none, or no prompts are held out."""
    if plan.evaluation is None or not len(held_out):
        return None
    return FlowEvaluation(executor, plan.evaluation, questions(held_out))


def evaluation(
    plan: Plan,
    role: BoundRole,
    engine: Engine,
    lanes: Lanes,
    held_out: HeldOut,
    sets: tuple[HeldOutSet, ...],
    options: Options,
) -> Evaluation:
    """Measure the accuracy of a role's answers to held-out prompts."""
    model = engine.models[role.name]
    if isinstance(model, Model) and model.generator is None:
        model.generator = _generator_for_evaluation(role, options, engine.keeper.loaded)
    node = next((n for n in all_nodes(plan.graph.nodes) if n.op is Op.GENERATE and n.role == role.name), None)
    own = node.options(GenerateOptions) if node else GenerateOptions(1, held_out.longest + 1)
    passed: dict[str, Any] = {name: value for name in PASSED if (value := getattr(own, name)) is not None}
    sampling = Sampling(options.eval_samples, own.max_tokens, **passed)
    return Evaluation(lanes, engine, role.name, sets, sampling)


def _generator_for_evaluation(role: BoundRole, options: Options, loaded: LoadedModels) -> Any:
    """A generator for a flow that never samples."""
    return make_models(
        [role], options, device_of(options.device), {}, lambda role: Halves(False, True), loaded
    )[role.name].generator
