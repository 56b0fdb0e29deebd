"""Decide which roles of a run are evaluated on held-out prompts, on which records, and by which judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlflow.author.batch import Batch
from rlflow.author.node_options import GenerateOptions
from rlflow.compiler.graph.ancestry import chosen_from
from rlflow.compiler.graph.model import Graph, Op, all_nodes
from rlflow.compiler.plan import Plan
from rlflow.compiler.trace.evaluation import RESPONSES
from rlflow.compiler.trace.repeat_rules import chosen_prompts
from rlflow.config.flags import NULL
from rlflow.config.options import Options
from rlflow.config.roles.backends import device_of
from rlflow.config.roles.bound import BoundRole, Roles, Sides
from rlflow.config.roles.loaded_models import LoadedModels, make_models
from rlflow.config.roles.prompt_room import room
from rlflow.config.roles.rewards import Rewards
from rlflow.data.dataset import Dataset
from rlflow.data.faults import refused, spoken
from rlflow.errors import PlanError, listed
from rlflow.execution.engine import Engine
from rlflow.execution.executor import Executor
from rlflow.execution.queues import Queues
from rlflow.execution.role_model import Model
from rlflow.runs.evaluate import Evaluation, FlowEvaluation, HeldOutSet
from rlflow.runs.guards import in_order
from rlflow.training.protocols import Sampling

# sampling options of a role that also apply in evaluation
PASSED = ("top_p", "top_k", "stop", "stop_token_ids", "min_tokens", "skip_special_tokens")


@dataclass(frozen=True)
class HeldOut:
    """The records that a run doesn't train on."""

    data: Dataset  # records held out from the training data
    sets: Mapping[str, Dataset] = field(default_factory=dict)  # the sets given with --eval, by name

    @property
    def longest(self) -> int:
        """The length of the longest held-out response in tokens, or 0 if there are no responses.

        If a flow never samples, this limits the length of answers in its evaluation.
        """
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
        """Return the held-out sets that a reward can score, with their judges.

        Raises PlanError if no reward can score a set given with ``--eval``.
        """
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
    """Return the records as prompts without responses, each prompt only once."""
    prompts = data.batch(range(len(data)))
    if prompts.axis.grouped:  # pairs: a prompt appears in two rows
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
    """Return the sets given with ``--eval`` by name, without records that a model can't handle.

    ``opened``: opens the sets, given the names of the roles. ``note`` is called about skipped records, and
    with a warning for each set whose prompts contain control tokens. Raises PlanError if the flow has an
    evaluation of its own, and for unusable records, unless ``--bad-records`` is skip or the run has
    ``begun``.
    """
    if options.eval and graph.evaluation is not None:
        raise PlanError.of(
            "eval-own",
            "the flow has its own evaluation, which only uses prompts held out of the data",
            found=f"--eval {options.eval[0]}",
            expected="no --eval, because the flow defines what counts as an answer",
            remedy="leave --eval out, and measure the trained model after the run: "
            f"rlflow eval RUN/final/ROLE --eval {options.eval[0]}",
        )
    if not options.eval or options.backend == NULL:
        if options.eval:
            note("the null backend has no model to measure: the sets of --eval are not opened")
        return {}
    sets: dict[str, Dataset] = {}
    for name, data in opened([use.name for use in graph.roles]).items():
        limited = replace(data, room=room(graph, roles, (), False))
        left_out = limited.faulty(range(len(limited)))
        faults = in_order([*data.faults, *left_out.values()])
        if faults and (len(left_out) == len(data) or (not begun and options.bad_records == "stop")):
            raise refused(data.name, faults, len(data) + len(data.faults), limited.room)
        if faults:
            note(f"skipped {len(faults)} records of the held-out set '{name}': {spoken(faults)}")
        sets[name] = replace(
            limited, records=[record for place, record in enumerate(data.records) if place not in left_out]
        )
        if templated := sets[name].templated(f"the held-out set '{name}'"):
            note(str(templated))
    return sets


def evaluated_role(graph: Graph, roles: Roles, sets: Sequence[HeldOutSet], options: Options) -> str | None:
    """Return the first role to evaluate, or None if there are no held-out prompts that a reward can score."""
    return evaluation_role(graph, roles, options) if sets else None


def evaluations(
    plan: Plan,
    roles: Roles,
    first: str,
    engine: Engine,
    queues: Queues,
    held_out: HeldOut,
    sets: tuple[HeldOutSet, ...],
    options: Options,
) -> Evaluation:
    """Return the evaluation of the role ``first`` and of all other roles that answer prompts from the data.

    If the flow trains several language models, metrics include the role's name.
    """
    names = [first, *(name for name in evaluation_roles(plan.graph, roles, options) if name != first)]
    own, *others = (evaluation(plan, roles[name], engine, queues, held_out, sets, options) for name in names)
    return replace(own, others=tuple(others), named=len(policies(roles)) > 1)


def flow_evaluation(executor: Executor, plan: Plan, held_out: Dataset) -> FlowEvaluation | None:
    """Return the flow's own evaluation, or None if it has none or there are no held-out prompts."""
    if plan.evaluation is None or not len(held_out):
        return None
    return FlowEvaluation(executor, plan.evaluation, questions(held_out))


def evaluation(
    plan: Plan,
    role: BoundRole,
    engine: Engine,
    queues: Queues,
    held_out: HeldOut,
    sets: tuple[HeldOutSet, ...],
    options: Options,
) -> Evaluation:
    """Return the evaluation of one role's answers to held-out prompts."""
    model = engine.models[role.name]
    if isinstance(model, Model) and model.generator is None:
        model.generator = _generator_for_evaluation(role, options, engine.offloads.loaded)
    node = next((n for n in all_nodes(plan.graph.nodes) if n.op is Op.GENERATE and n.role == role.name), None)
    own = node.options(GenerateOptions) if node else GenerateOptions(1, held_out.longest + 1)
    passed: dict[str, Any] = {name: value for name in PASSED if (value := getattr(own, name)) is not None}
    sampling = Sampling(options.eval_samples, own.max_tokens, **passed)
    return Evaluation(queues, engine, role.name, sets, sampling)


def _generator_for_evaluation(role: BoundRole, options: Options, loaded: LoadedModels) -> Any:
    """Return a generator for a role that doesn't sample in the flow."""
    return make_models(
        [role], options, device_of(options.device), {}, lambda role: Sides(False, True), loaded
    )[role.name].generator


def evaluation_role(graph: Graph, roles: Roles, options: Options) -> str | None:
    """Return the first role to evaluate if held-out records can be scored, or None if there's no such role."""
    return next(iter(evaluation_roles(graph, roles, options)), None)


def evaluation_roles(graph: Graph, roles: Roles, options: Options) -> tuple[str, ...]:
    """Return the roles to evaluate if held-out records can be scored.

    These are the trained language models that sample from prompts in the data or, if there are none, the
    first trained model. If several roles sample in training, only those whose answers to these prompts are
    scored by a reward count. If the flow trains nothing, ``--eval`` evaluates all roles that sample from
    these prompts. Returns () if the flow has an evaluation of its own.
    """
    names, answering = policies(roles), answering_roles(graph)
    if len(playing := [name for name in names if roles[name].use.generates]) > 1:
        names = [name for name in playing if name in scored_roles(graph)]
    if options.eval and not any(role.use.trained for role in roles.values()):
        names = [name for name in roles if name in answering]
    names = [name for name in names if name in answering] or names[:1]
    return (
        tuple(names)
        if (options.held_out or options.eval) and options.backend != "null" and graph.evaluation is None
        else ()
    )


def unmeasured(graph: Graph, roles: Roles, options: Options) -> str:
    """Return a message if accuracy isn't measured although there are held-out prompts, otherwise "".

    This happens if several roles sample and no reward scores their answers to the data's prompts.
    """
    playing = [name for name in policies(roles) if roles[name].use.generates]
    asked = (options.held_out or options.eval) and options.backend != NULL and graph.evaluation is None
    if not asked or len(playing) < 2 or evaluation_roles(graph, roles, options):
        return ""
    return (
        f"held-out accuracy is not measured: {listed(playing)} sample, and no reward scores their answers "
        "to the data's questions. Define with @flow(evaluate=…) which rows are answers"
    )


def policies(roles: Roles) -> list[str]:
    """Return the names of the trained language models."""
    return [name for name, role in roles.items() if role.use.trained and role.use.head == "logprobs"]


def answering_roles(graph: Graph) -> set[str]:
    """Return the roles that sample from the data's prompts or some of them, including calls in a `repeat`."""
    roles: set[str] = set()
    for node in graph.nodes:
        if node.body is not None:
            roles |= answering_roles(node.body)
        elif node.op is Op.GENERATE and node.role and chosen_prompts(graph.axes, node.axis):
            roles.add(node.role)
    return roles


def scored_roles(graph: Graph) -> set[str]:
    """Return the roles whose answers to the data's prompts, or to some of them, are scored by a reward.

    Calls in a `repeat` are included.
    """
    sampled: dict[int, set[str]] = {}
    scored: set[str] = set()
    for node in graph.nodes:
        if node.body is not None:
            scored |= scored_roles(node.body)
            sampled[node.rows_axis] = answering_roles(node.body)
        elif node.op is Op.GENERATE and node.role and chosen_prompts(graph.axes, node.axis):
            sampled[node.rows_axis] = {node.role}
        elif node.op is Op.REWARD:
            scored |= set().union(*(sampled.get(axis, set()) for axis in chosen_from(graph.axes, node.axis)))
    return scored
