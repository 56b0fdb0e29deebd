"""Compile a flow and its settings to a program: the graph of one iteration and the functions of its nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlflow.author.columns import PROMPT_ID, Kind, field_column, fits, standard_kind, text
from rlflow.author.flow import Flow
from rlflow.author.loss import Loss
from rlflow.author.memory import Buffer, Stored, Table, follows, stores
from rlflow.author.node_options import FollowOptions, plain
from rlflow.author.scope import entered
from rlflow.author.stage import Stage
from rlflow.compiler.graph.model import (
    Graph,
    Input,
    MemorySlot,
    Node,
    Op,
    Output,
    RoleUse,
    RowAxis,
    StateSlot,
    all_nodes,
    without_unread_parts,
)
from rlflow.compiler.trace import column_rules, rules
from rlflow.compiler.trace.arguments import arguments, raised, role_names
from rlflow.compiler.trace.drawn_by import DrawnBy, drawn_by
from rlflow.compiler.trace.evaluation import trace_evaluation
from rlflow.compiler.trace.followed import add_follows
from rlflow.compiler.trace.graph_recorder import STATE, Context, StoredColumns
from rlflow.compiler.trace.graph_rules import graph_problems
from rlflow.compiler.trace.schedule_rules import due_problems
from rlflow.compiler.trace.symbols import (
    ColumnSource,
    SymbolicBatch,
    SymbolicBuffer,
    SymbolicRole,
    SymbolicTable,
)
from rlflow.compiler.trace.tracer import Tracer
from rlflow.errors import FlowError, Place, Problem

if TYPE_CHECKING:
    from rlflow.rewards.environments.environment_spec import EnvironmentSpec

PAIR = ("chosen", "rejected")  # text fields in the data that become two rows


@dataclass(frozen=True)
class TraceOptions:
    """Settings of a run that affect a flow's graph."""

    rewards: int = 1  # number of rewards bound to ``*rewards``
    reward_reads: tuple[str, ...] = ("completion", "answer")  # columns that reward functions read
    # columns from the data; None: the standard columns and the columns that the flow declares
    columns: Mapping[str, Kind] | None = None
    # column → place of the reward function that reads it, for messages
    reward_places: Mapping[str, Place] = field(default_factory=dict)
    # call, such as actor.generate#2 → settings that replace the flow's
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fields: tuple[str, ...] = ()  # fields of the data's file
    # role → its environment; the key "" stands for the only role that samples
    environments: Mapping[str, EnvironmentSpec] = field(default_factory=dict)
    weights: tuple[float, ...] = ()  # weight of each reward bound to ``*rewards``, in their order; default 1
    prompts_by: str | None = None  # the weights by which prompts are drawn, as TABLE.COLUMN


@dataclass(frozen=True)
class Program:
    """A traced flow: its graph, and its nodes' stages and losses."""

    flow: Flow
    hp: Any
    graph: Graph
    functions: Mapping[str, Stage | Loss] = field(repr=False)  # node → its stage or loss
    # node → the settings that its stage or loss is called with
    settings: Mapping[str, Mapping[str, Any]] = field(repr=False)
    weights: Mapping[str, float] = field(default_factory=dict)  # role → weight, for each of ``*rewards``
    # roles whose weight the flow reads; their scores are not multiplied by it
    weighed: frozenset[str] = frozenset()
    drawn_by: DrawnBy | None = None  # the weights by which prompts are drawn; None: they come in order

    def loss(self, name: str) -> Loss:
        """Return the loss of the update node ``name``."""
        loss = self.functions[name]
        assert isinstance(loss, Loss)
        return loss

    def stage(self, name: str) -> Stage:
        """Return the stage that the node ``name`` calls."""
        stage = self.functions[name]
        assert isinstance(stage, Stage)
        return stage


@dataclass(frozen=True)
class TraceResult:
    """The result of tracing a flow: all problems, and the program, or None if that failed."""

    program: Program | None
    problems: tuple[Problem, ...]

    def sound(self) -> Program:
        """Return the program, or raise one FlowError with all errors if there were any."""
        errors = [problem for problem in self.problems if problem.severity == "error"]
        if errors or self.program is None:
            raise FlowError(*errors)
        return self.program


def compile_flow(flow: Flow, hp: Any = None, options: TraceOptions | None = None) -> Program:
    """Trace a flow and return its program. All errors are raised together, as one FlowError."""
    return trace(flow, hp, options).sound()


def trace(flow: Flow, hp: Any = None, options: TraceOptions | None = None) -> TraceResult:
    """Trace a flow and return its program and all problems. ``hp`` defaults to the flow's own settings.

    If the flow reads ``prompt_id``, it is traced again with that column, so that other flows don't need to
    carry it.
    """
    first, reads_prompt_id = _traced(flow, hp, options or TraceOptions(), numbered=False)
    return _traced(flow, hp, options or TraceOptions(), numbered=True)[0] if reads_prompt_id else first


def sampling_roles(flow: Flow) -> tuple[str, ...]:
    """Return the roles that sample in a flow with its own settings, or () if it can't be traced."""
    program = trace(flow).program
    return tuple(use.name for use in program.graph.roles if use.generates) if program else ()


def _traced(flow: Flow, hp: Any, options: TraceOptions, numbered: bool) -> tuple[TraceResult, bool]:
    """Trace a flow. Also return True if it must be traced again, with ``prompt_id``.

    That's the case if the flow reads ``prompt_id`` and the data don't have it. ``numbered``: whether they do.
    """
    try:
        parameters = flow.parameters
    except FlowError as error:
        return TraceResult(None, error.problems), False
    hp = hp if hp is not None else parameters.hp
    try:
        declared = flow.kept(hp)
    except FlowError as error:
        return TraceResult(None, error.problems), False
    names = tuple(f.name for f in dataclasses.fields(hp)) if dataclasses.is_dataclass(hp) else ()
    roles = role_names(flow, options.rewards)
    several = roles.get(parameters.rest or "", [])
    weights = dict.fromkeys(several, 1.0) | dict(zip(several, options.weights, strict=False))
    context = Context(
        names,
        options.reward_reads,
        tuple(name for bound in roles.values() for name in bound),
        options.reward_places,
        options.sampling,
        options.fields,
        options.environments,
        weights,
    )
    tracer, columns = Tracer(context), _data_columns(flow, options, numbered)
    given = _Arguments(flow, hp, roles, stores(declared), _initial(tracer, flow, hp), columns)
    tracer.drawable = _drawable(context, given)
    result, stopped = _call(tracer, given)
    tracer.problems += stopped
    evaluation = (
        trace_evaluation(tracer, flow, hp, options.rewards, columns)
        if flow.evaluate and not stopped
        else None
    )
    if not stopped:
        add_follows(tracer, follows(declared), evaluation, flow.place)
    graph = _graph(tracer, given, result, evaluation)
    drawn: DrawnBy | None = None
    problems: list[Problem] = []
    if not stopped and options.prompts_by is not None:
        drawn, problems = drawn_by(graph, tracer.functions, options.prompts_by, flow.place)
    if not stopped:
        problems += graph_problems(graph, tracer, flow.place, drawn, flow.trains)
    problems += due_problems(graph, tracer.functions)
    distinct = tuple(dict.fromkeys([*tracer.problems, *problems]))
    weighed = frozenset(tracer.weighed)
    program = Program(flow, hp, graph, tracer.functions, tracer.bound, weights, weighed, drawn)
    return TraceResult(program, distinct), tracer.reads_prompt_id and not numbered


def _initial(tracer: Tracer, flow: Flow, hp: Any) -> dict[str, float]:
    """Return the initial values of the flow's state, reporting any problems with how it is declared."""
    try:
        initial = {name: float(value) for name, value in (flow.state(hp) if flow.state else {}).items()}
    except (Exception, SystemExit) as error:
        tracer.report(rules.state_raised(flow.name, error, flow.place))
        return {}
    state, data = f"the state of flow '{flow.name}'", f"flow '{flow.name}': its data"
    own = [(state, name) for name in initial] + [(data, name) for name in flow.data]
    tracer.report(
        *(
            column_rules.gives_run(what, name, flow.place, None)
            for what, name in own
            if name in column_rules.OF_THE_RUN
        )
    )
    tracer.report(
        *(
            column_rules.table_kind(state, name, STATE, standard_kind(name), flow.place, None)
            for name in initial
            if standard_kind(name) and name not in column_rules.OF_THE_RUN
        ),
        *(
            column_rules.table_kind(data, name, kind, standard_kind(name), flow.place, None)
            for name, kind in flow.data.items()
            if name not in (*PAIR, *column_rules.OF_THE_RUN) and not fits(kind, standard_kind(name))
        ),
    )
    return initial


@dataclass(frozen=True)
class _Arguments:
    """What a flow's function is called with while it is traced."""

    flow: Flow
    hp: Any
    roles: Mapping[str, list[str]]
    kept: Mapping[str, Stored]
    initial: Mapping[str, float]  # initial values of the state
    columns: Mapping[str, Kind | None]  # of the data


def _call(tracer: Tracer, given: _Arguments) -> tuple[Any, list[Problem]]:
    """Call the flow's function with symbols. Returns its result, and any problems that stopped it."""
    flow, kept = given.flow, given.kept
    axis = tracer.axis(RowAxis(grouped="chosen" in flow.data))
    prompts = tracer.batch(axis, _data(tracer, flow, axis, given.columns))
    tracer.state = tracer.state_columns(dict.fromkeys(given.initial, STATE))
    rewards = len(given.roles.get(flow.parameters.rest or "", []))

    def make(name: str) -> SymbolicRole | SymbolicTable | SymbolicBuffer:
        match kept.get(name):
            case Table() as spec:
                return SymbolicTable(tracer, name, spec)
            case Buffer() as spec:
                return SymbolicBuffer(tracer, name, spec)
        return SymbolicRole(tracer, name)

    positional, named = arguments(flow, make, given.hp, rewards)
    try:
        with entered(tracer):
            return flow.function(prompts, *positional, **named), []
    except FlowError as error:
        return None, list(error.problems)
    except (Exception, SystemExit) as error:
        return None, [raised(flow, error)]


# traces of a flow with a buffer before the one that counts; more are needed if what is put depends on draws
TRACES = 3


def _drawable(context: Context, given: _Arguments) -> Mapping[str, StoredColumns]:
    """Return what the flow puts into each of its buffers.

    Draws stand before puts, so the flow is traced to find out. Problems are only reported by the last trace.
    """
    found: Mapping[str, StoredColumns] = {}
    for _ in range(TRACES) if any(isinstance(spec, Buffer) for spec in given.kept.values()) else ():
        tracer = Tracer(context)
        tracer.drawable = found
        _call(tracer, given)
        if tracer.stored == found:
            break
        found = tracer.stored
    return found


def _data(
    tracer: Tracer, flow: Flow, axis: int, columns: Mapping[str, Kind | None]
) -> dict[str, ColumnSource]:
    """Record the node for the data and return its columns."""
    node = Node(
        0,
        Op.DATA,
        flow.parameters.data,
        axis,
        outputs=tuple(Output(name, kind, name) for name, kind in columns.items()),
    )
    tracer.recorded.nodes.append(node)
    return tracer.symbols(node).sources


def _data_columns(flow: Flow, options: TraceOptions, numbered: bool) -> dict[str, Kind | None]:
    """Return the data's columns.

    If the data haven't been opened yet, these are the columns that the flow declares, plus the fields that
    rewards and environments read.
    """
    names: dict[str, Kind | None] = (
        dict(options.columns) if options.columns is not None else data_columns(flow)
    )
    if options.columns is None:
        asked = {
            name
            for spec in options.environments.values()
            for name in (*spec.source.required, *spec.source.optional)
        }
        names |= {
            field_column(name): text
            for name in options.fields
            if name in options.reward_reads or name in asked - names.keys()
        }
    names = {
        name: kind if fits(kind, standard_kind(name)) else standard_kind(name) for name, kind in names.items()
    }
    return names | ({PROMPT_ID: standard_kind(PROMPT_ID)} if numbered else {})


def reads_prompt_id(graph: Graph) -> bool:
    """Return True if the data must have the column ``prompt_id``, because a node reads it."""
    return any(output.name == PROMPT_ID for output in graph.nodes[0].outputs)


def data_columns(flow: Flow) -> dict[str, Kind | None]:
    """Return the columns that a flow declares for its data, as name → kind.

    If these include completions or pairs, the columns of responses are added.
    """
    names: dict[str, Kind | None] = {
        name: standard_kind(name) for name in ("prompt", "answer", "prompt_tokens")
    }
    names |= {name: kind for name, kind in flow.data.items() if name not in PAIR}
    if {"completion", "chosen"} & set(flow.data):
        names |= {name: standard_kind(name) for name in ("completion", "tokens", "mask", "finish")}
    if "chosen" in flow.data:
        names |= {name: standard_kind(name) for name in ("group", "chosen")}
    return names


def _graph(tracer: Tracer, given: _Arguments, result: Any, evaluation: Graph | None) -> Graph:
    nodes, hp, initial = tuple(tracer.recorded.nodes), given.hp, given.initial
    settings = (
        tuple((f.name, plain(getattr(hp, f.name))) for f in dataclasses.fields(hp))
        if dataclasses.is_dataclass(hp)
        else ()
    )
    slots = tuple(StateSlot(name, initial[name], tracer.state[name].column) for name in initial)
    evaluating = evaluation.nodes if evaluation else ()
    uses = tuple(
        role_use(name, nodes, tracer.functions, evaluating)
        for names in given.roles.values()
        for name in names
    )
    results: tuple[Input, ...] = ()
    rows = 0
    if isinstance(result, SymbolicBatch) and result.recorded is tracer.recorded:
        results, rows = (
            tuple(Input(name, source.column) for name, source in result.sources.items()),
            result.axis,
        )
    graph = Graph(
        given.flow.name,
        nodes,
        tuple(tracer.recorded.axes),
        settings,
        uses,
        slots,
        results,
        rows,
        evaluation,
        tuple(MemorySlot(name, spec) for name, spec in given.kept.items()),
    )
    return without_unread_parts(graph)


def role_use(
    name: str,
    nodes: tuple[Node, ...],
    functions: Mapping[str, Stage | Loss],
    evaluating: tuple[Node, ...] = (),
) -> RoleUse:
    """Find out how a flow uses a role.

    ``functions``: each node's stage or loss. ``evaluating``: the nodes of the flow's own evaluation, whose
    samples aren't trained on.
    """
    own_nodes = [node for node in all_nodes(nodes) if node.role == name]
    losses = [
        loss
        for node in own_nodes
        if node.op is Op.UPDATE and isinstance(loss := functions.get(node.name), Loss)
    ]
    ops = {node.op for node in (*own_nodes, *evaluating) if node.role == name}
    head = (
        losses[0].head
        if losses
        else "values"
        if Op.VALUES in ops
        else "scores"
        if Op.REWARD in ops
        else "logprobs"
    )
    follows = next(
        (node.settings.follows for node in own_nodes if isinstance(node.settings, FollowOptions)), None
    )
    return RoleUse(
        name, bool(losses), head, any(node.op is Op.GENERATE for node in own_nodes), Op.REWARD in ops, follows
    )
