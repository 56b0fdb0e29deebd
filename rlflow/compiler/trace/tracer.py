"""The tracer: it calls a flow on symbols and records a graph.

It records calls of stages and of role methods, but never tensor operations. The tracer reports a mistake and
continues if possible. It reports a missing column once and then treats it as given, so that one trace also
finds later, independent mistakes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlflow.author import methods
from rlflow.author.columns import (
    CLOCK,
    MODEL_PROMPT,
    PROMPT_ID,
    Kind,
    Level,
    field_column,
    fits,
    row,
    scalar,
    standard_kind,
    text,
)
from rlflow.author.joint import JointLoss, joined, specification
from rlflow.author.loss import Loss
from rlflow.author.methods import Setting, missing_setting, unknown_setting
from rlflow.author.node_options import (
    AskOptions,
    ChooseOptions,
    GenerateOptions,
    NodeOptions,
    Pairs,
    RepeatOptions,
    ShownOptions,
    UpdateOptions,
    plain,
)
from rlflow.author.scope import AskWay, current
from rlflow.author.signature import REQUIRED, ColumnParameter, Signature
from rlflow.author.source_lines import call_place, definition_place, digest
from rlflow.author.stage import Stage
from rlflow.compiler.graph.ancestry import Merge, line, merge
from rlflow.compiler.graph.model import SETTING, Column, Graph, Input, Node, Op, Output, RowAxis
from rlflow.compiler.trace import rules
from rlflow.compiler.trace.symbols import (
    CallSettings,
    ColumnSource,
    RecordedGraph,
    SymbolicBatch,
    call_settings,
)
from rlflow.errors import FlowError, Place, Problem

if TYPE_CHECKING:
    from rlflow.rewards.environments.environment_spec import EnvironmentSpec

REST = ("prompt", "answer")  # columns that a ``reset`` with **kwargs gets, if the rows have them
NO_OPTIONS = NodeOptions()
STATE = scalar("float32")  # the kind of a state


@dataclass(frozen=True)
class Context:
    """Facts about the run that the tracer needs.

    ``settings`` are names of settings for hints, ``roles`` are names of roles, and ``reward_reads`` are the
    columns that reward functions read.
    """

    settings: tuple[str, ...] = ()
    reward_reads: tuple[str, ...] = ("completion", "answer")
    roles: tuple[str, ...] = ()
    # column → place of the function that reads it
    reward_places: Mapping[str, Place] = field(default_factory=dict)
    # call, such as actor.generate#2 → settings that replace the flow's
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fields: tuple[str, ...] = ()  # fields of the data's file, for messages
    # role → its environment; the key "" stands for the only role that samples
    environments: Mapping[str, EnvironmentSpec] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)  # role → weight, for each of ``*rewards``


class Tracer:
    """Receives a flow's calls while it is traced."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.recorded = RecordedGraph()
        self.problems: list[Problem] = []
        self.functions: dict[str, Stage | Loss] = {}
        self.bound: dict[str, dict[str, Any]] = {}  # node → the settings of its stage or loss
        self.state: dict[str, ColumnSource] = {}
        self.calls = 0
        self.weighed: set[str] = set()  # roles of ``*rewards`` whose weight the flow asked for
        # True if something read ``prompt_id``; the data give this column only then
        self.reads_prompt_id = False
        self._poisoned: set[tuple[int, str]] = set()
        self._names: dict[str, int] = {}
        self.depth = 0
        self.prefix = ""  # prefix of the names of nodes
        self.temperatures = True  # False: the run's settings do not replace the flow's temperatures

    # -- nodes
    # --------------------------------------------------------------------------------------------------------

    def axis(self, axis: RowAxis) -> int:
        """Record an axis of rows and return its number."""
        self.recorded.axes.append(axis)
        return len(self.recorded.axes) - 1

    def add(self, op: Op, name: str, axis: int, settings: NodeOptions = NO_OPTIONS, **fields: Any) -> Node:
        """Append a node under a unique name."""
        unique, counted = self._unique(name), self.prefix + name
        self._names[counted] = self._names.get(counted, 0) + 1
        node = Node(len(self.recorded.nodes), op, unique, axis, call=self.calls, settings=settings, **fields)
        self.recorded.nodes.append(node)
        self.calls += 1
        return node

    def _unique(self, name: str) -> str:
        """Return the unique name of the next node with this name."""
        counted = self.prefix + name
        count = self._names.get(counted, 0) + 1
        return counted if count == 1 else f"{counted}#{count}"

    def symbols(self, node: Node) -> SymbolicBatch:
        """Return the columns that a node gives, over their axis."""
        return self.batch(
            node.rows_axis, {o.name: ColumnSource(Column(node.id, o.name), o.kind) for o in node.outputs}
        )

    def batch(self, axis: int, sources: Mapping[str, ColumnSource]) -> SymbolicBatch:
        """Return a traced batch over an axis with these columns."""
        return SymbolicBatch(self, self.recorded, axis, sources)

    def report(self, *problems: Problem) -> None:
        """Store problems, each once."""
        self.problems += [problem for problem in dict.fromkeys(problems) if problem not in self.problems]

    # -- reading columns
    # -----------------------------------------------------------------------------------------------------

    def mine(self, batch: Any, what: str) -> SymbolicBatch:
        """Return the batch if it belongs to this trace, else raise FlowError."""
        if not isinstance(batch, SymbolicBatch):
            raise FlowError(rules.not_a_batch(what, batch, call_place()))
        if current() is not self or batch.recorded is not self.recorded:
            raise FlowError(rules.leaked(call_place()))
        return batch

    def find(self, batch: SymbolicBatch, name: str, what: str) -> ColumnSource | None:
        """Return the column ``name``. If the batch does not have it, report that and return None."""
        self.mine(batch, what)
        source = batch.sources.get(name)
        if source is None:
            place, number = call_place(), name in self.state or name in CLOCK
            self._missing(
                batch, name, what, place, None, rules.state_as_column(what, name, place) if number else None
            )
        return source

    def scalar(self, name: str) -> ColumnSource | None:
        """Return the scalar of this name if every batch has it: a state, ``iteration`` or ``progress``; else
        None."""
        if name in self.state or name not in CLOCK:
            return self.state.get(name)
        if not self.recorded.clock:
            self.recorded.clock = self._scalars("clock", {name: standard_kind(name) for name in CLOCK})
        return self.recorded.clock[name]

    def _missing(
        self,
        batch: SymbolicBatch,
        name: str,
        what: str,
        place: Place | None,
        definition: Place | None,
        problem: Problem | None = None,
    ) -> None:
        """Report a column once per axis, as missing or with this ``problem``; then treat it as given."""
        self.reads_prompt_id |= name == PROMPT_ID
        if (batch.axis, name) not in self._poisoned:
            self._poisoned.add((batch.axis, name))
            self.report(
                problem
                or rules.missing(what, name, self.visible(batch), place, definition, self.context.settings)
            )

    def visible(self, batch: SymbolicBatch) -> list[str]:
        """Return the names of the columns and states that a call on this batch may read."""
        return [*batch.sources, *(name for name in self.state if name not in batch.sources)]

    def inputs(
        self, batch: SymbolicBatch, parameters: Iterable[ColumnParameter], what: str, definition: Place | None
    ) -> tuple[Input, ...]:
        """Return the inputs of a call for its parameters, and report problems with their columns."""
        inputs, place = [], call_place()
        for parameter in parameters:
            source = self.scalar(parameter.name) or batch.sources.get(parameter.name)
            if source is None:
                self._absent(batch, parameter, what, place, definition)
                continue
            if not fits(source.kind, parameter.kind):
                self.report(rules.wrong_kind(what, parameter, source.kind, place, definition))
            inputs.append(Input(parameter.name, source.column))
        return tuple(inputs)

    def _absent(
        self,
        batch: SymbolicBatch,
        parameter: ColumnParameter,
        what: str,
        place: Place | None,
        definition: Place | None,
    ) -> None:
        self.reads_prompt_id |= parameter.name == PROMPT_ID
        if parameter.optional:
            self.report(rules.optional_absent(what, parameter.name, place, definition))
        else:
            self._missing(batch, parameter.name, what, place, definition)

    # -- calls
    # --------------------------------------------------------------------------------------------------------

    def stage(
        self, stage: Stage, batch: Any, gives: tuple[str, ...] | None, settings: dict[str, Any]
    ) -> SymbolicBatch:
        """Record a stage."""
        what, place = f"stage '{stage.name}'", call_place()
        batch = self.mine(batch, what)
        outputs = self._outputs(what, stage.gives, gives, place, stage.place)
        axis = self.recorded.axes[batch.axis]
        bound, edges = self._settings(what, stage.signature, settings, place, stage.place, ("generator",))
        inputs = self.inputs(batch, stage.signature.columns, what, stage.place)
        sound = [output for output in outputs if stage.gives[output.source] in (None, output.kind)]
        self.report(
            *rules.stage_rules(stage, sound, axis, place),
            *rules.role_rules(stage, self.context.roles, place),
            *rules.state_rules(stage, outputs, self.state, place),
        )
        if len(inputs) == len(stage.signature.columns):
            self.report(
                *rules.length_rules(
                    stage, sound, [batch.columns.get(item.parameter) for item in inputs], place
                )
            )
        node = self.add(
            Op.STAGE,
            stage.name,
            batch.axis,
            inputs=inputs + edges,
            outputs=outputs,
            settings=ShownOptions(_shown(bound)),
            role=stage.on,
            dispatch=str(stage.dispatch),
            rows=stage.rows,
            digest=stage.digest,
            timeout=stage.timeout,
            pure=stage.pure,
            place=place,
            definition=stage.place,
        )
        self.functions[node.name], self.bound[node.name] = stage, bound
        result = self.symbols(node)
        self.state = self.state | {
            name: source for name, source in result.sources.items() if name in self.state
        }
        if self.depth and (changed := [output.name for output in outputs if output.name in self.state]):
            self.report(rules.state_in_body(what, changed, place))
        return result

    def _outputs(
        self,
        what: str,
        kinds: Mapping[str, Kind | None],
        names: tuple[str, ...] | None,
        place: Place | None,
        definition: Place | None,
    ) -> tuple[Output, ...]:
        """Return the outputs of a call under the ``names`` that it gives them (None: their own), and check
        them against the standard columns."""
        if names is not None and (len(names) != len(kinds) or len(set(names)) != len(names)):
            self.report(rules.gives_count(what, names, kinds, place, definition))
            names = None
        outputs = []
        for source, name in zip(kinds, names or kinds, strict=True):
            kind, table = kinds[source], STATE if name in self.state else standard_kind(name)
            if name in rules.OF_THE_DATA:
                self.report(rules.gives_prompt(what, name, place, definition))
                continue  # later readers get the data's column
            if name in rules.OF_THE_RUN:
                self.report(rules.gives_run(what, name, place, definition))
                continue
            if kind is not None and table is not None and not fits(kind, table):
                other = rules.state_rows if name in self.state else rules.table_kind
                self.report(other(what, name, kind, table, place, definition))
                kind = table  # later readers are checked against the correct kind
            if kind is None and table is None:
                self.report(rules.own_column(what, name, place, definition))
            outputs.append(Output(name, kind if kind is not None else table, source))
        return tuple(outputs)

    def _settings(
        self,
        what: str,
        signature: Signature,
        settings: Mapping[str, Any],
        place: Place | None,
        definition: Place | None,
        skip: tuple[str, ...] = (),
        also: tuple[str, ...] = (),
    ) -> tuple[dict[str, Any], tuple[Input, ...]]:
        """Return the settings of a stage or loss, and inputs for settings that are scalar columns.

        ``also``: names that the same call uses for its own settings.
        """
        known = {name: default for name, default in signature.settings.items() if name not in skip}
        for name in settings:
            if name not in known and not signature.open_settings:
                self.report(unknown_setting(what, name, {**known, **dict.fromkeys(also)}, place, definition))
        for name, default in known.items():
            if default is REQUIRED and name not in settings:
                self.report(missing_setting(what, name, "a value", place, definition))
        call = self._call_settings(what, settings, known, signature.takes_float)
        bound = {name: default for name, default in known.items() if default is not REQUIRED} | call.values
        return call.without_edges(bound), call.edges

    def _call_settings(
        self,
        what: str,
        settings: Mapping[str, Any],
        defaults: Mapping[str, Any],
        takes: Callable[[str], bool],
    ) -> CallSettings:
        """Split the settings of a call into values and scalar columns, and report problems."""
        call = call_settings(what, settings, defaults, takes, self.recorded, call_place())
        self.report(*call.problems)
        return call

    def _bound(
        self,
        what: str,
        specification: Mapping[str, Setting],
        settings: Mapping[str, Any],
        place: Place | None,
    ) -> dict[str, Any]:
        """Return the settings of a method with defaults filled in, and report problems with them."""
        bound, problems = methods.checked(what, specification, settings, place)
        self.report(*problems)
        return bound

    def number(self, name: str) -> None:
        """Return None: real batches do not belong to a trace."""

    def weight(self, role: str) -> float:
        """Return the weight of a role's reward; 1 for a role outside ``*rewards``.

        The scores of a role whose weight the flow reads are not multiplied by it later.
        """
        self.weighed |= {role} & self.context.weights.keys()
        return self.context.weights.get(role, 1.0)

    def no_settings(self, what: str, names: Iterable[str]) -> None:
        """Report the settings passed to a method that takes none."""
        self.report(*(unknown_setting(what, name, {"gives": None}, call_place()) for name in names))

    def generate(self, role: str, prompts: Any, settings: dict[str, Any]) -> SymbolicBatch:
        """Record a `generate` call."""
        what, place = f"{role}.generate", call_place()
        prompts = self.mine(prompts, what)
        own = methods.sampling_of(self.context.sampling, what, self._unique(what))
        own = {name: value for name, value in own.items() if name != "temperature" or self.temperatures}
        call = self._call_settings(what, settings, _defaults(methods.GENERATE), methods.COMPUTED.__contains__)
        call = replace(
            call, edges=tuple(item for item in call.edges if item.parameter.removeprefix(SETTING) not in own)
        )
        bound = methods.resampled(self._bound(what, methods.GENERATE, call.values, place), own)
        self.report(*methods.too_short(bound, self.context.sampling, what, self._unique(what), place))
        if self.recorded.axes[prompts.axis].grouped:
            self.report(rules.not_prompts(what, place))
        reads = ("prompt_tokens", *(name for name in ("prefix_length",) if name in prompts.sources))
        inputs = self.inputs(
            prompts, [ColumnParameter(name, standard_kind(name), False) for name in reads], what, None
        )
        environment = self.context.environments.get(role) or self.context.environments.get("")
        if environment is not None:
            inputs += self._environment_inputs(environment, prompts, what, place)
            self.report(*rules.environment_settings(environment, bound["lengths"], what, place))
        self._asked_by(role, prompts.axis)
        makes = self.axis(RowAxis(prompts.axis, bound["samples"], True))
        outputs = tuple(
            Output(name, methods.KINDS[name], name) for name in (*methods.GENERATE_GIVES, "group")
        )
        more: dict[str, Any] = {}
        sampling = call.without_edges(bound)
        seconds = methods.DEADLINES["generate"]
        if environment is not None:
            outputs += tuple(Output(name, standard_kind(name), name) for name in methods.EPISODE_GIVES)
            seconds += environment.bounds.turns * environment.bounds.seconds
            more = {"digest": environment.digest, "definition": environment.place}
            sampling["environment"] = str(environment)
        node = self.add(
            Op.GENERATE,
            what,
            prompts.axis,
            inputs=inputs + call.edges,
            outputs=outputs,
            settings=GenerateOptions(**sampling),
            role=role,
            makes=makes,
            timeout=seconds,
            place=place,
            **more,
        )
        return self.batch(makes, prompts.sources | self.symbols(node).sources)

    def _environment_inputs(
        self, environment: EnvironmentSpec, prompts: SymbolicBatch, what: str, place: Place | None
    ) -> tuple[Input, ...]:
        """Return the columns, and fields of the data, that the environment's ``reset`` reads."""
        source = environment.source
        names = dict.fromkeys(source.required, True) | dict.fromkeys(
            (*source.optional, *(REST if source.rest else ())), False
        )
        columns = {
            column: name
            for name in names
            if (column := name if name in prompts.sources else field_column(name)) in prompts.sources
        }
        for name, required in names.items():
            if required and name not in columns.values():
                self._missing(
                    prompts,
                    name,
                    what,
                    place,
                    source.place,
                    rules.environment_missing(
                        environment, name, self.visible(prompts), place, self.context.fields
                    ),
                )
        if source.rest:
            columns |= {name: name for name in prompts.sources if name.startswith(field_column(""))}
        self.report(
            *(
                rules.environment_kind(environment, name, kind, place)
                for name in columns
                if (kind := prompts.sources[name].kind) is not None and kind.level not in rules.ONE_PER_ROW
            )
        )
        return tuple(Input(name, prompts.sources[name].column) for name in columns)

    def forward(self, role: str, method: str, batch: Any, gives: str | tuple[str, ...]) -> SymbolicBatch:
        """Record a `logprobs` call (with the entropy if ``gives`` has a second name) or a `values` call."""
        what, place = f"{role}.{method}", call_place()
        batch = self.mine(batch, what)
        names = (gives,) if isinstance(gives, str) else tuple(gives)
        sources = {"logprobs": ("logprobs", "entropy"), "values": ("values",)}[method][: max(len(names), 1)]
        outputs = self._outputs(
            what, {source: methods.KINDS[source] for source in sources}, names, place, None
        )
        inputs = self._model_inputs(batch, what, ("temperature",) if method == "logprobs" else ())
        op = Op.LOGPROBS if method == "logprobs" else Op.VALUES
        node = self.add(
            op,
            what,
            batch.axis,
            inputs=inputs,
            outputs=outputs,
            role=role,
            timeout=methods.DEADLINES[method],
            place=place,
        )
        return self.symbols(node)

    def _model_inputs(
        self, batch: SymbolicBatch, what: str, optional: tuple[str, ...], more: tuple[str, ...] = ()
    ) -> tuple[Input, ...]:
        """Return the columns that a model reads, without a note about optional columns that are absent."""
        needs = [ColumnParameter(name, standard_kind(name), False) for name in (*methods.MODEL_READS, *more)]
        needs += [
            ColumnParameter(name, standard_kind(name), False) for name in optional if name in batch.sources
        ]
        return self.inputs(batch, needs, what, None)

    def reward(self, role: str, batch: Any, gives: str | tuple[str, ...]) -> SymbolicBatch:
        """Record the call of a reward function, or of a reward model if the batch has tokens and no
        completion."""
        what, place = role, call_place()
        batch = self.mine(batch, what)
        outputs = self._outputs(
            what,
            {"scores": methods.KINDS["scores"]},
            (gives,) if isinstance(gives, str) else tuple(gives),
            place,
            None,
        )
        model = "completion" not in batch.sources and "tokens" in batch.sources
        reads = methods.MODEL_READS if model else self.context.reward_reads
        # if there is no column for a parameter, it reads the field of the data with this name
        reads = tuple(
            field_column(name) if name not in batch.sources and field_column(name) in batch.sources else name
            for name in reads
        )
        # follow-up prompts do not have this column
        reads = tuple(name for name in reads if name != MODEL_PROMPT or name in batch.sources)
        for name in reads if not model else ():
            if name not in batch.sources and name not in self.state:
                of = self.context.reward_places.get(name)
                missing = rules.reward_missing(
                    what, name, self.visible(batch), place, of, self.context.fields
                )
                self._missing(batch, name, what, place, of, missing)
        needs = [ColumnParameter(name, standard_kind(name), False) for name in reads]
        more = [
            n
            for n in (*methods.MODEL_READS, "prompt", "entry", *methods.OF_EPISODES)
            if n in batch.sources and n not in reads
        ]
        inputs = self.inputs(
            batch, [*needs, *(ColumnParameter(name, None, True) for name in more)], what, None
        )
        timeout = methods.DEADLINES["reward"]
        node = self.add(
            Op.REWARD,
            role,
            batch.axis,
            inputs=inputs,
            outputs=outputs,
            role=role,
            timeout=timeout,
            place=place,
        )
        return self.symbols(node)

    def update(self, role: str, batch: Any, loss: Any, settings: dict[str, Any]) -> None:
        """Record an `update` call."""
        what, place = f"{role}.update", call_place()
        batch = self.mine(batch, what)
        if wrong := rules.no_losses(loss):
            return self.report(rules.not_a_loss(what, wrong[0], place))
        specified = specification(loss)
        settings = self._call_settings(
            what,
            {name: value for name, value in settings.items() if name in specified},
            _defaults(specified),
            lambda name: False,
        ).values | {name: value for name, value in settings.items() if name not in specified}
        if isinstance(loss, tuple | list):
            loss, problems = joined(what, loss, settings, place)
            self.report(*problems)
        bound = self._bound(
            what, specified, {name: value for name, value in settings.items() if name in specified}, place
        )
        if isinstance(loss, JointLoss):
            bound |= {
                "losses": tuple(part.name for part in loss.losses),
                "scale": loss.scale,
                "where": loss.where,
            }
        rest = {name: value for name, value in settings.items() if name not in specified}
        own, edges = self._settings(
            f"{what} with loss '{loss.name}'", loss.signature, rest, place, loss.place, also=tuple(specified)
        )
        # the settings of the update itself are not passed to its losses
        own = {name: value for name, value in own.items() if name not in specified}
        inputs = self._model_inputs(batch, what, ("temperature", "group"), ("mask",))
        inputs += (
            tuple(
                item
                for item in self.inputs(batch, loss.signature.columns, f"loss '{loss.name}'", loss.place)
                if item.parameter not in {known.parameter for known in inputs}
            )
            + edges
        )
        levels = {name: kind.level if kind else None for name, kind in batch.columns.items()}
        self.report(
            *rules.update_rules(loss, self.recorded.axes[batch.axis], what, place),
            *rules.torn_groups(loss, levels, what, place),
        )
        node = self.add(
            Op.UPDATE,
            what,
            batch.axis,
            inputs=inputs,
            settings=UpdateOptions(**bound, own=_shown(own)),
            role=role,
            rows=loss.rows,
            digest=loss.digest,
            timeout=methods.DEADLINES["update"],
            pure=False,
            place=place,
            definition=loss.place,
        )
        self.functions[node.name], self.bound[node.name] = loss, own

    # -- merging
    # --------------------------------------------------------------------------------------------------------

    def rename(self, batch: SymbolicBatch, names: Mapping[str, str]) -> SymbolicBatch:
        """Return the batch with columns under new names."""
        renamed = {}
        for old, new in names.items():
            source, table = self.find(batch, old, "rename"), standard_kind(new)
            # a prompt column that gets its own name back is the data's column
            if source and new in rules.OF_THE_DATA and source.column.name != new:
                self.report(rules.gives_prompt("rename", new, call_place(), None))
                continue
            if source and new in rules.OF_THE_RUN:
                self.report(rules.gives_run("rename", new, call_place(), None))
                continue
            if source and not fits(source.kind, table):
                self.report(rules.table_kind("rename", new, source.kind, table, call_place(), None))
                source = ColumnSource(source.column, table)
            if source:
                renamed[new] = source
        rest = {name: source for name, source in batch.sources.items() if names.get(name) not in renamed}
        self._replace(rest, renamed, call_place())
        return batch._with(rest | renamed)

    def _replace(
        self, sources: Mapping[str, ColumnSource], by: Mapping[str, ColumnSource], place: Place | None
    ) -> None:
        """Record which columns in ``sources`` are replaced by columns of the same name in ``by``."""
        columns = {name: sources[name].column for name in by if name in sources}
        self.recorded.replaced += [
            (column, place) for name, column in columns.items() if column != by[name].column
        ]

    def merge(self, batch: SymbolicBatch, other: SymbolicBatch) -> SymbolicBatch:
        """Return the batch with the columns of another batch whose rows are the same or related."""
        self.mine(batch, "|"), self.mine(other, "|")
        place = call_place()
        problems = self._unrelated(batch.axis, other, place)
        self.report(*problems)
        if any(problem.code == "row-axes" for problem in problems):
            self._poisoned |= {(batch.axis, name) for name in other.sources if name not in batch.sources}
            return batch
        self._replace(batch.sources, other.sources, place)
        return batch._with(batch.sources | self._coming_up(batch.axis, other))

    def _coming_up(self, axis: int, other: SymbolicBatch) -> dict[str, ColumnSource]:
        """Return the columns of ``other`` as rows of ``axis`` read them.

        Columns of follow-up prompts at single tokens become token columns.
        """
        return {
            name: ColumnSource(source.column, Kind(Level.TOKEN, source.kind.dtype))
            if source.kind and self._way(axis, other, source.kind) is Merge.TOKENS
            else source
            for name, source in other.sources.items()
        }

    def _way(self, axis: int, other: SymbolicBatch, kind: Kind | None) -> Merge:
        return merge(self.recorded.axes, axis, other.axis, kind is not None and kind.level is Level.GROUP)

    def _unrelated(self, axis: int, other: SymbolicBatch, place: Place | None) -> list[Problem]:
        """Return the problems of merging the columns of ``other`` if the rows are unrelated or some rows get
        no value."""
        ways = {
            name: self._way(axis, other, source.kind)
            for name, source in other.sources.items()
            if not _is_scalar(source.kind)
        }
        tokens = [
            name for name, source in other.sources.items() if source.kind and source.kind.level is Level.TOKEN
        ]
        if Merge.NEVER in ways.values() or (tokens and Merge.WHOLE not in ways.values()):
            return [rules.other_rows(other.sources, tokens, place)]
        some = {
            name: other.sources[name].kind for name, way in ways.items() if way in (Merge.SOME, Merge.TOKENS)
        }
        return [
            rules.lacking_rows(name, kind, place)
            for name, kind in some.items()
            if kind and kind.family != "float"
        ]

    # -- rows of rows
    # --------------------------------------------------------------------------------------------------------

    def ask(self, batch: Any, column: str, way: AskWay) -> SymbolicBatch:
        """Record an `ask`."""
        place = call_place()
        batch = self.mine(batch, "ask")
        kind = rules.until_kind(batch.columns.get(column)) if way == "until" else text
        inputs = [
            Input("until" if way == "until" else "text", item.column)
            for item in self.inputs(batch, [ColumnParameter(column, kind, False)], "ask", None)
        ]
        inputs += (
            self._model_inputs(batch, "ask", ("prefix_length",) if way == "until" else ())
            if way != "text"
            else ()
        )
        by_token = way == "until" and kind.level is Level.TOKEN
        makes = self.axis(RowAxis(batch.axis, 0 if by_token else 1, step="cut" if by_token else "asked"))
        outputs = tuple(Output(name, standard_kind(name), name) for name in ASK_GIVES[way])
        node = self.add(
            Op.ASK,
            "ask",
            batch.axis,
            inputs=tuple(inputs),
            outputs=outputs,
            settings=AskOptions(self._sampler(batch) if way != "text" else ()),
            makes=makes,
            place=place,
        )
        along = {
            name: source
            for name, source in batch.sources.items()
            if way == "until" and name in ("prompt", MODEL_PROMPT)
        }
        return self.batch(makes, follow_up_columns(batch.sources) | along | self.symbols(node).sources)

    def _sampler(self, batch: SymbolicBatch) -> tuple[str, ...]:
        """Return the role that sampled the tokens of the rows as a tuple; empty if several roles or none
        did."""
        tokens = batch.sources.get("tokens")
        role = self.recorded.nodes[tokens.column.node].role if tokens is not None else None
        return (role,) if role else ()

    def _asked_by(self, role: str, axis: int) -> None:
        """Record at the `ask` node that the role samples from its follow-up prompts, so that they are encoded
        for this role."""
        nearest = next(
            (step for step in line(self.recorded.axes, axis) if self.recorded.axes[step].step == "asked"),
            None,
        )
        for number, node in enumerate(self.recorded.nodes):
            if nearest is not None and node.makes == nearest:
                roles = tuple(dict.fromkeys((*node.options(AskOptions).roles, role)))
                self.recorded.nodes[number] = replace(node, settings=AskOptions(roles))

    def choose(self, batch: Any, column: str, settings: ChooseOptions) -> SymbolicBatch:
        """Record a `choose`."""
        place = call_place()
        batch = self.mine(batch, "choose")
        axis, kind = self.recorded.axes[batch.axis], row if settings.count else row("bool")
        inputs = self.inputs(batch, [ColumnParameter(column, kind, False)], "choose", None)
        if settings.per == "group" and not axis.grouped:
            self.report(rules.choose_groups(place))
        flag = batch.columns.get(column)
        whole = flag is not None and flag.level is Level.GROUP and not settings.count
        makes = self.axis(RowAxis(batch.axis, axis.samples if whole else 0, axis.grouped, "chosen"))
        self.add(
            Op.CHOOSE,
            "choose",
            batch.axis,
            inputs=tuple(Input("by", item.column) for item in inputs),
            settings=settings,
            makes=makes,
            place=place,
        )
        return self.batch(makes, batch.sources)

    def concat(self, batches: Sequence[Any]) -> SymbolicBatch:
        """Record a `concat`."""
        place, parts = call_place(), [self.mine(batch, "concat") for batch in batches]
        names = [
            name
            for name in parts[0].sources
            if name != "group" and all(name in part.sources for part in parts)
        ]
        shared = {name: parts[0].sources[name] for name in names if _is_scalar(parts[0].sources[name].kind)}
        names = [name for name in names if name not in shared]
        kinds = {name: [part.sources[name].kind for part in parts] for name in names}
        self.report(*(problem for name in names if (problem := rules.joined_kinds(name, kinds[name], place))))
        axes = [self.recorded.axes[part.axis] for part in parts]
        grouped = all(axis.grouped for axis in axes)
        makes = self.axis(RowAxis(None, 0, grouped, "joined", tuple(part.axis for part in parts)))
        outputs = [Output(name, _per_row(parts[0].sources[name].kind), name) for name in names]
        outputs += [Output("group", standard_kind("group"), "group")] if grouped else []
        inputs = tuple(
            Input(f"{i}.{name}", part.sources[name].column) for i, part in enumerate(parts) for name in names
        )
        node = self.add(
            Op.CONCAT,
            "concat",
            parts[0].axis,
            inputs=inputs,
            outputs=tuple(outputs),
            makes=makes,
            place=place,
        )
        return self.batch(makes, shared | self.symbols(node).sources)

    # -- repetition
    # --------------------------------------------------------------------------------------------------------

    def repeat(self, body: Callable[..., Any], prompts: Any, groups: int, tries: int) -> SymbolicBatch:
        """Record a `repeat` with the graph of its body."""
        place = call_place()
        prompts = self.mine(prompts, "repeat")
        bound = self._bound("repeat", methods.REPEAT, {"groups": groups, "tries": tries}, place)
        columns = [
            n
            for n, source in prompts.sources.items()
            if self.recorded.nodes[source.column.node].op is not Op.DATA
        ]
        if columns or prompts.axis != 0:
            self.report(rules.repeat_prompts(columns, place))
        name, call = getattr(body, "__name__", "body"), self.calls
        with self._inside(prompts) as inner:
            result = body(inner)
            if not isinstance(result, SymbolicBatch):
                raise FlowError(rules.body_result(name, result, place, definition_place(body)))
            self.mine(result, "repeat")
            chosen = rules.chosen_prompts(self.recorded.axes, result.axis)
            if "keep" not in result.sources and not chosen:
                self.report(rules.no_keep(name, list(result.sources), place, definition_place(body)))
            graph = Graph(
                name,
                tuple(self.recorded.nodes),
                tuple(self.recorded.axes),
                results=tuple(Input(n, source.column) for n, source in result.sources.items()),
                rows=result.axis,
            )
            kinds, axis, replaced = result.columns, self.recorded.axes[result.axis], self.recorded.replaced
            self.report(*rules.body_rows(self.recorded.axes, result.axis, place))
        self.report(
            *rules.body_rules(graph, place),
            *rules.replaced_unread(graph, replaced),
            *rules.never_read(graph, self.functions),
        )
        inputs = tuple(Input(n, source.column) for n, source in (prompts.sources | self.state).items())
        makes = self.axis(RowAxis(None, axis.samples, axis.grouped))
        outputs = tuple(Output(n, kind, n) for n, kind in kinds.items())
        node = self.add(
            Op.REPEAT,
            f"repeat.{name}",
            prompts.axis,
            inputs=inputs,
            outputs=outputs,
            settings=RepeatOptions(**bound),
            makes=makes,
            body=graph,
            digest=digest(body),
            timeout=float("inf"),
            place=place,
            definition=definition_place(body),
        )
        self.recorded.nodes[-1] = node = replace(node, call=call)
        return self.symbols(node)

    @contextlib.contextmanager
    def _inside(self, prompts: SymbolicBatch) -> Iterator[SymbolicBatch]:
        """Record into a separate graph whose data are the prompts. Names stay unique over both graphs."""
        outer, poisoned, state = self.recorded, self._poisoned, self.state
        self.recorded, self._poisoned, self.depth = RecordedGraph(), set(), self.depth + 1
        axis = self.axis(RowAxis())
        outputs = tuple(Output(name, source.kind, name) for name, source in prompts.sources.items())
        node = Node(0, Op.DATA, "prompts", axis, outputs=outputs, call=self.calls)
        self.recorded.nodes.append(node)
        self.state = self.state_columns({name: source.kind for name, source in state.items()})
        try:
            yield self.symbols(node)
        finally:
            self.recorded, self._poisoned, self.state, self.depth = outer, poisoned, state, self.depth - 1

    def state_columns(self, kinds: Mapping[str, Kind | None]) -> dict[str, ColumnSource]:
        """Add a node that gives the scalars of the state, if there are any, and return its columns."""
        return self._scalars("state", kinds) if kinds else {}

    def _scalars(self, name: str, kinds: Mapping[str, Kind | None]) -> dict[str, ColumnSource]:
        """Add a node that gives scalars known before an iteration begins, and return its columns."""
        outputs = tuple(Output(column, kind, column) for column, kind in kinds.items())
        node = Node(len(self.recorded.nodes), Op.STATE, name, 0, outputs=outputs)
        self.recorded.nodes.append(node)
        return self.symbols(node).sources


def _shown(settings: Mapping[str, Any]) -> Pairs:
    return tuple((name, plain(value)) for name, value in settings.items())


def _defaults(specification: Mapping[str, Setting]) -> dict[str, Any]:
    return {name: setting.default for name, setting in specification.items()}


# columns that follow-up prompts do not keep
LEFT_BEHIND = ("completion", "finish", "group", "prefix_length", MODEL_PROMPT, *rules.OF_THE_DATA)


ASK_GIVES: dict[AskWay, tuple[str, ...]] = {
    "text": rules.OF_THE_DATA,
    "after": rules.OF_THE_DATA,
    "until": ("prompt_tokens", "prefix_length"),
}


def follow_up_columns(sources: Mapping[str, ColumnSource]) -> dict[str, ColumnSource]:
    """Return the columns that follow-up prompts keep: columns with one value per row."""
    along = {name: source for name, source in sources.items() if name not in LEFT_BEHIND}
    return {
        name: ColumnSource(source.column, _per_row(source.kind))
        for name, source in along.items()
        if source.kind is None or source.kind.level not in (Level.TOKEN, Level.PROMPT)
    }


def _per_row(kind: Kind | None) -> Kind | None:
    return Kind(Level.ROW, kind.dtype) if kind is not None and kind.level is Level.GROUP else kind


def _is_scalar(kind: Kind | None) -> bool:
    return kind is not None and kind.level is Level.SCALAR
