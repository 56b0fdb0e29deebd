"""Eager flows: run the calls of a flow immediately, on real batches in this process, for debugging."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlflow.author import methods, scope
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.author.columns import CLOCK, OF_PROMPTS, Kind, Level, fits, row, text
from rlflow.author.figures import Figure, Of
from rlflow.author.flow import Flow
from rlflow.author.joint import joined, specification
from rlflow.author.loss import Loss
from rlflow.author.memory import Kept, follows
from rlflow.author.node_options import ChooseOptions, ConcatOptions, EncodeOptions, UpdateOptions
from rlflow.author.scope import AskWay, symbolic
from rlflow.author.signature import REQUIRED, ColumnParameter, Signature
from rlflow.author.source_lines import call_place, definition_place
from rlflow.author.stage import Stage
from rlflow.compiler.trace import column_rules, repeat_rules, rules
from rlflow.compiler.trace.row_tracer import ASK_GIVES, ENCODE_GIVES, LEFT_BEHIND, OLD_RESPONSE
from rlflow.errors import FlowError, Place, Problem, SkipIteration
from rlflow.execution.account import RowAccount
from rlflow.execution.apply import apply_stage, failing
from rlflow.execution.computed import as_numbers
from rlflow.execution.engine import CallOptions, Engine, KeptMemory, Metrics, model_reads, reads
from rlflow.execution.lineage import asked_data, chosen_rows, joined_rows
from rlflow.execution.not_due import none_of, present, there, without_rows
from rlflow.execution.repeat import RepeatNames, repeat_groups
from rlflow.execution.tally import PartialMetric, PartialMetrics, accumulated, figures
from rlflow.training.protocols import Sampling
from rlflow.training.threads import alone


class OutsideFlow:
    """The scope outside any flow: stages run immediately, without random numbers, roles or state."""

    def number(self, name: str) -> None:
        """Return None, because there are no state scalars outside a flow."""

    def stage(
        self, stage: Stage, batch: Any, gives: tuple[str, ...] | None, settings: dict[str, Any]
    ) -> Batch:
        """Run a stage outside a flow, in this process, and return its output columns.

        Raises FlowError if the stage needs the trainer of a role.
        """
        if stage.on is not None:
            raise FlowError(
                Problem(
                    "stage-role",
                    f"stage '{stage.name}' runs on the role '{stage.on}'",
                    call_place(),
                    stage.place,
                    found="a call outside any flow",
                    expected="a call inside a flow that has the role",
                    remedy="call it inside a flow, or call its function with a trainer and tensors",
                )
            )
        _, settings = methods.split_schedule(settings, stage.signature.settings)
        inputs, settings = prepared(stage, batch, {}, settings)
        with failing(stage.name, 0, inputs, call_place()), alone():
            result, _ = apply_stage(stage, inputs, settings, 0)
        return renamed(f"stage '{stage.name}'", result, gives)

    def repeat(self, body: Callable[..., Any], prompts: Any, settings: dict[str, Any]) -> Any:
        """Raise FlowError, because `repeat` can't be used outside a flow."""
        raise FlowError(
            Problem(
                "repeat-outside",
                "repeat needs the data cursor of a run",
                call_place(),
                found="a call outside any flow",
                expected="a call inside a flow",
                remedy="call the flow with the objects of rlflow.roles(…)",
            )
        )

    def ask(self, batch: Any, column: str, way: AskWay) -> Any:
        """Raise FlowError, because `ask` can't be used outside a flow."""
        raise FlowError(
            Problem(
                "ask-outside",
                "ask needs the tokenizers of a run",
                call_place(),
                found="a call outside any flow",
                expected="a call inside a flow",
                remedy="call the flow with the objects of rlflow.roles(…)",
            )
        )

    def encode(self, batch: Any, column: str, settings: EncodeOptions) -> Any:
        """Raise FlowError, because `encode` can't be used outside a flow."""
        raise FlowError(
            Problem(
                "encode-outside",
                "encode needs the tokenizers of a run",
                call_place(),
                found="a call outside any flow",
                expected="a call inside a flow",
                remedy="call the flow with the objects of rlflow.roles(…)",
            )
        )

    def choose(self, batch: Any, column: str, options: ChooseOptions) -> Batch:
        """Return the rows selected by the values of ``column``, as ``options`` says."""
        rows = real("choose", batch)
        return rows.rows(chosen_rows(rows[column], rows.axis, options))

    def concat(self, batches: Sequence[Any], options: ConcatOptions) -> Batch:
        """Return one batch with the rows of all batches, joined as ``options`` says."""
        return joined_rows(_parts(batches, options), options)


def _parts(batches: Sequence[Any], options: ConcatOptions) -> list[Batch]:
    """Return the real batches to join. Raises FlowError if ``options`` fill a column that none of them has."""
    parts = [real("concat", batch) for batch in batches]
    known = dict.fromkeys(name for part in parts for name in part.data)
    FlowError.refuse(
        column_rules.filled_nowhere(name, known, call_place())
        for name, _ in options.fill
        if name not in known
    )
    return parts


def prepared(
    stage: Stage, batch: Any, state: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Batch, dict[str, Any]]:
    """Return the columns that a stage reads, and its settings with defaults filled in.

    ``state``: the columns of the flow's state. Raises the same FlowError as tracing if a column or setting is
    missing.
    """
    what, place = f"stage '{stage.name}'", call_place()
    batch = real(what, batch)
    if state:
        batch = Batch(batch.axis, batch.data | dict(state))
    optional = [column.name for column in stage.signature.columns if column.optional]
    batch = present(what, batch, stage.signature.column_names, optional)
    check_columns(what, stage.signature, batch, place, stage.place)
    return reads(stage.signature.column_names, batch), checked(
        what, stage.signature, settings, ("generator",)
    )


def reading(column: str, kind: Kind) -> Signature:
    """Return the signature of a function that reads only this column."""
    return Signature((ColumnParameter(column, kind, False),), {}, False)


def real(what: str, batch: Any) -> Batch:
    """Return the batch unchanged. Raises FlowError if it's symbolic or not a batch."""
    if not isinstance(batch, Batch):
        raise FlowError(
            rules.leaked(call_place()) if symbolic(batch) else rules.not_a_batch(what, batch, call_place())
        )
    return batch


def check_columns(
    what: str, signature: Signature, batch: Batch, place: Place | None, definition: Place | None
) -> None:
    """Check that a batch has every column that a function reads, with the right kind.

    Raises the same FlowError as tracing. ``what``, ``place`` and ``definition`` are for its message: the name
    of the call, its line, and the line of the function.
    """
    problems = []
    for parameter in signature.columns:
        if parameter.name not in batch and not parameter.optional:
            problems.append(
                column_rules.missing(what, parameter.name, list(batch.data), place, definition, ())
            )
        elif parameter.name in batch and not fits(batch.columns[parameter.name], parameter.kind):
            problems.append(
                column_rules.wrong_kind(what, parameter, batch.columns[parameter.name], place, definition)
            )
    FlowError.refuse(problems)


def checked(
    what: str, signature: Signature, settings: Mapping[str, Any], skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the settings with defaults filled in. Raises FlowError for unknown or missing settings.

    ``skip``: parameters of the function that aren't settings.
    """
    known = {name: default for name, default in signature.settings.items() if name not in skip}
    place = call_place()
    problems = [
        methods.unknown_setting(what, name, known, place)
        for name in settings
        if name not in known and not signature.open_settings
    ]
    problems += [
        methods.missing_setting(what, n, "a value", place)
        for n, d in known.items()
        if d is REQUIRED and n not in settings
    ]
    FlowError.refuse(problems)
    values = computed_settings(what, settings, signature.takes_float, signature)
    return {name: default for name, default in known.items() if default is not REQUIRED} | values


def computed_settings(
    what: str, settings: Mapping[str, Any], takes: Callable[[str], bool], signature: Signature | None
) -> dict[str, Any]:
    """Convert the scalar columns among the settings to numbers.

    Only settings for which ``takes(name)`` is True may be columns. Raises FlowError if a number is out of
    range.
    """
    try:
        return as_numbers(settings, takes, signature)
    except ValueError as error:
        raise FlowError(
            Problem(
                "setting-range",
                f"{what} has a setting out of range",
                call_place(),
                found=str(error),
                expected="a number within its range",
                remedy="clamp the value in the stage that computes it",
            )
        ) from error


def renamed(what: str, batch: Batch, gives: tuple[str, ...] | None) -> Batch:
    """Rename the columns of a batch to ``gives``, in order. None keeps the names.

    Raises FlowError if the number of names differs from the number of columns.
    """
    names = gives or tuple(batch.data)
    FlowError.refuse(
        column_rules.gives_prompt(what, name, call_place(), None)
        for name in names
        if name in column_rules.OF_THE_DATA
    )
    FlowError.refuse(
        column_rules.gives_run(what, name, call_place(), None)
        for name in names
        if name in column_rules.OF_THE_RUN
    )
    if gives is None:
        return batch
    if len(gives) != len(batch.data) or len(set(gives)) != len(gives):
        raise FlowError(column_rules.gives_count(what, gives, batch.data, call_place(), None))
    return batch.rename(**dict(zip(batch.data, gives, strict=True)))


@dataclass
class Session:
    """The scope of an eager iteration, which runs the calls of a flow.

    Calls are numbered as in tracing, so both draw the same random numbers.
    """

    engine: Engine
    metrics: Metrics = field(default_factory=dict)
    calls: int = 0
    within: bool = False  # a `repeat` body is running
    stepped: set[str] = field(default_factory=set)  # roles that took an optimizer step
    scalars: dict[str, Any] = field(default_factory=dict)  # the last value of each scalar column
    idle: bool = False  # the body of a `repeat` that isn't due is called, so that its calls are counted
    memory: dict[str, KeptMemory] = field(default_factory=dict)  # what the iteration wrote
    puts: set[str] = field(default_factory=set)  # buffers into which the iteration has put rows
    drawn: list[Axis] = field(default_factory=list)  # axes with rows that were drawn from buffers
    _names: dict[str, int] = field(default_factory=dict)
    _tallies: dict[Figure, PartialMetric] = field(default_factory=dict)

    def next_call(self, name: str, counts: bool = True) -> tuple[int, str]:
        """Return the number of a call of ``name`` in program order, and the name of its node.

        ``counts``: whether the call takes a number, as in ``GraphRecorder.add``.
        """
        count = self._names[name] = self._names.get(name, 0) + 1
        self.calls += counts
        return self.calls - counts, name if count == 1 else f"{name}#{count}"

    def due(
        self, node: str, settings: Mapping[str, Any], own: Container[str] = ()
    ) -> tuple[bool, dict[str, Any]]:
        """Return whether a call is due in this iteration, and its settings without ``every`` and ``after``.

        ``own``: names of settings that the called stage itself has.
        """
        schedule, rest = methods.split_schedule(settings, own)
        bound = methods.bind(node, methods.SCHEDULE, schedule, call_place())
        return methods.schedule_of(bound).due(self.engine.iteration) and not self.idle, rest

    def number(self, name: str) -> Tensor | None:
        """Return the value of a state scalar, of ``iteration`` or of ``progress``, as a compiled flow would.

        Returns None for any other name.
        """
        if name not in self.engine.state and name not in CLOCK:
            return None
        value: Tensor = (
            self.engine.clock() | {n: self.engine.state_data(v) for n, v in self.engine.state.items()}
        )[name].value
        return value

    def log(self, node: str, metrics: PartialMetrics, of: Of = Of.NODE, role: str = "") -> None:
        """Store the metrics of a node.

        ``of``: what kind of node it is. ``role``: the role that the node calls, if any.
        """
        self.metrics |= accumulated(self._tallies, figures(metrics, of, node, role))

    def stage(
        self, stage: Stage, batch: Any, gives: tuple[str, ...] | None, settings: dict[str, Any]
    ) -> Batch:
        """Run a stage on a batch and return its output columns, which are None if it isn't due."""
        call, node = self.next_call(stage.name)
        due, settings = self.due(node, settings, stage.signature.settings)
        if not due:
            none = renamed(
                f"stage '{stage.name}'", Batch(real(node, batch).axis, none_of(stage.gives)), gives
            )
            self.scalars |= {name: None for name in none.data if name not in self.engine.state}
            return none.drop(*(name for name in none.data if name in self.engine.state))
        inputs, settings = prepared(
            stage, batch, self.engine.state_batch(real(stage.name, batch)).data, settings
        )
        with (
            failing(node, self.engine.iteration, inputs, call_place()),
            nullcontext() if stage.on else alone(),
        ):
            result, metrics = self.engine.stage(stage, inputs, settings, call)
        self.log(node, metrics, Of.STAGE)
        result = renamed(f"stage '{stage.name}'", result, gives)
        self.scalars |= {
            name: data.value for name, data in result.data.items() if data.kind.level is Level.SCALAR
        }
        self.engine.state |= {
            name: float(result.data[name].value) for name in result.data if name in self.engine.state
        }
        return result

    def ask(self, batch: Any, column: str, way: AskWay) -> Batch:
        """Return a follow-up prompt for each row.

        The prompts aren't encoded until a role samples from them, because each role has its own tokenizer.
        """
        place, batch = call_place(), real("ask", batch)
        _, node = self.next_call("ask")
        if self.follows(batch, column):
            return without_rows(batch, ASK_GIVES[way])
        batch = there(batch)
        kind = rules.until_kind(batch.columns.get(column)) if way == "until" else text
        check_columns("ask", reading(column, kind), batch, place, None)
        inputs = {"until" if way == "until" else "text": batch.data[column]}
        inputs |= {
            name: batch.data[name]
            for name in (*methods.MODEL_READS, "prefix_length")
            if way != "text" and name in batch
        }
        with failing(node, self.engine.iteration, batch, place):
            rows, metrics = self.engine.ask(Batch(batch.axis, inputs), (), CallOptions(node=node))
        self.log(node, metrics)
        along = {
            name: data
            for name, data in batch.data.items()
            if (name not in LEFT_BEHIND or (way == "until" and name in OF_PROMPTS)) and not data.ragged
        }
        return Batch(
            rows.axis,
            {name: asked_data(data, rows.axis, batch.axis) for name, data in along.items()} | rows.data,
        )

    def encode(self, batch: Any, column: str, settings: EncodeOptions) -> Batch:
        """Return rows whose responses are the texts in ``column``."""
        place, batch = call_place(), real("encode", batch)
        _, node = self.next_call("encode")
        if self.follows(batch, column):
            return without_rows(batch, ENCODE_GIVES)
        batch = there(batch)
        reads = (ColumnParameter(column, text, False), ColumnParameter("prompt_tokens", None, False))
        check_columns("encode", Signature(reads, {}, False), batch, place, None)
        inputs = {"text": batch.data[column], "prompt_tokens": batch.data["prompt_tokens"]}
        inputs |= {name: batch.data[name] for name in ("prefix_length",) if name in batch}
        with failing(node, self.engine.iteration, batch, place):
            rows, metrics = self.engine.encode(Batch(batch.axis, inputs), settings, CallOptions(node=node))
        self.log(node, metrics)
        along = {
            name: asked_data(data, rows.axis, batch.axis)
            for name, data in batch.data.items()
            if name not in OLD_RESPONSE and data.kind.level is not Level.TOKEN
        }
        return Batch(rows.axis, along | rows.data)

    def choose(self, batch: Any, column: str, options: ChooseOptions) -> Batch:
        """Return the rows selected by the values of ``column``, as ``options`` says.

        Raises SkipIteration if no row is left, except inside a `repeat`.
        """
        place, batch = call_place(), real("choose", batch)
        _, node = self.next_call("choose")
        if self.follows(batch, column):
            return without_rows(batch)
        check_columns("choose", reading(column, row if options.count else row("bool")), batch, place, None)
        rows, metrics = self.engine.choose(Batch(batch.axis, {"by": batch.data[column]}), options)
        self.log(node, metrics)
        if not len(rows) and not self.within:
            raise SkipIteration(f"{node} kept none of {len(batch)} rows")
        return Batch(rows.axis, batch.carried(rows.axis))

    def concat(self, batches: Sequence[Any], options: ConcatOptions) -> Batch:
        """Return one batch with the rows of all batches, joined as ``options`` says."""
        parts = _parts(batches, options)
        drawn = any(self._is_drawn(part.axis) for part in parts)
        self.next_call("concat", counts=not drawn)
        if (idle := next((part for part in parts if not part.axis.made), None)) is not None:
            return without_rows(idle)
        none = {name: data for part in parts for name, data in part.data.items() if data.value is None}
        shared = {name: data for name, data in none.items() if all(name in part for part in parts)}
        parts = [part.drop(*(none.keys() & part.data.keys())) for part in parts]
        joined = self.engine.concat(parts, options)
        self.drawn += [joined.axis] if drawn else []
        return Batch(joined.axis, joined.data | shared)

    def _is_drawn(self, axis: Axis) -> bool:
        """Return True if some rows of an axis come from a buffer."""
        return any(axis is drawn for drawn in self.drawn) or (
            axis.parent is not None and axis.step == "taken" and self._is_drawn(axis.parent)
        )

    def follows(self, batch: Batch, *columns: str) -> bool:
        """Return True if a call without a schedule isn't due, because its rows or columns aren't there."""
        return not batch.axis.made or any(
            column in batch and batch.data[column].value is None for column in columns
        )

    def repeat(self, body: Callable[..., Any], prompts: Any, settings: dict[str, Any]) -> Batch:
        """Call ``body`` with new prompts until it has kept enough groups, and return these groups."""
        place, name = call_place(), getattr(body, "__name__", "body")
        bound = methods.bind("repeat", methods.REPEAT | methods.SCHEDULE, settings, place)
        prompts = real("repeat", prompts)
        if not methods.schedule_of(bound).due(self.engine.iteration) or self.idle:
            return self._without_repeat(body, name, prompts)
        start, names = self.calls, dict(self._names)

        def run_body(batch: Batch) -> Batch:
            self.calls, self._names = start, dict(names)  # each try makes the same calls on different rows
            self.within = True
            try:
                result = body(batch)
            finally:
                self.within = False
            if not isinstance(result, Batch):
                raise FlowError(repeat_rules.body_result(name, result, place, definition_place(body)))
            present(f"repeat.{name}", result, ("keep",))
            if "keep" not in result and result.axis.grouped:
                raise FlowError(repeat_rules.no_keep(name, list(result.data), place, definition_place(body)))
            return result

        counted = RepeatNames(f"repeat.{name}", name)
        rows, metrics = repeat_groups(
            self.engine, run_body, prompts, **bound, account=RowAccount(), names=counted
        )
        _, node = self.next_call(f"repeat.{name}")
        self.log(node, metrics)
        return rows

    def follow(self, kept: Mapping[str, Kept]) -> None:
        """Move the weights of the roles that follow others, if they are due and have a model."""
        for name, spec in follows(kept).items():
            if name not in self.engine.models or not spec.schedule.due(self.engine.iteration):
                continue
            _, node = self.next_call(f"{name}.follow")
            if spec.when is not None and not self.scalars.get(spec.when, self.engine.state.get(spec.when)):
                continue
            stepped = spec.role in self.stepped
            self.log(node, self.engine.follow(name, spec.role, spec.mix, stepped))

    def _without_repeat(self, body: Callable[..., Any], name: str, prompts: Batch) -> Batch:
        """Count the calls of a `repeat` that isn't due, and return its columns, which are None."""
        outer, self.idle = self.idle, True
        try:
            result = body(without_rows(prompts))
        finally:
            self.idle = outer
        self.next_call(f"repeat.{name}")
        columns = result.columns if isinstance(result, Batch) else {}
        return Batch(prompts.axis.unmade(), none_of(columns))


def session_of(engine: Engine) -> Session:
    """Return the session of the running flow, or a new one for a call outside any flow."""
    session = scope.current()
    return session if isinstance(session, Session) else Session(engine)


class Role:
    """A role in an eager flow, with methods such as `generate` and `update`. Each call runs immediately."""

    def __init__(self, name: str, engine: Engine, weight: float = 1.0) -> None:
        """Create the role ``name``.

        ``weight``: the weight given by ``--reward X:WEIGHT``, if the role is one of ``*rewards``.
        """
        self._name = name
        self._engine = engine
        self.weight = weight

    def __repr__(self) -> str:
        return f"<role {self._name}>"

    def _call(self, method: str) -> tuple[Session, int, str]:
        session = session_of(self._engine)
        return (session, *session.next_call(f"{self._name}.{method}" if method else self._name))

    def generate(self, prompts: Batch, **settings: Any) -> Batch:
        """Sample rows from prompts, or give no rows if the call isn't due."""
        session, call, node = self._call("generate")
        due, settings = session.due(node, settings)
        if not due:
            return without_rows(real(node, prompts), self._engine.sampled_columns(self._name))
        prompts = present(node, real(node, prompts), MODEL_PROMPTS)
        settings = computed_settings(node, settings, methods.COMPUTED.__contains__, None)
        bound = methods.bind(node, methods.GENERATE, settings, call_place())
        sampling, method = self._engine.sampling, f"{self._name}.generate"
        bound = methods.resampled(bound, methods.sampling_of(sampling, method, node))
        FlowError.refuse(methods.too_short(bound, sampling, method, node, call_place()))
        if real(node, prompts).axis.grouped:
            raise FlowError(rules.not_prompts(node, call_place()))
        with failing(node, self._engine.iteration, prompts, call_place()):
            rows = self._engine.generate(self._name, prompts, Sampling(**bound), call)
        return Batch(rows.axis, prompts.carried(rows.axis) | rows.data)

    def logprobs(self, batch: Batch, *, gives: str | tuple[str, ...] = "logprobs", **settings: Any) -> Batch:
        """Return the log-probs of the rows, computed by the role's trainer. They are None if it isn't due.

        If ``gives`` has two names, also return entropies.
        """
        names = (gives,) if isinstance(gives, str) else tuple(gives)
        want = ("logprobs", "entropy")[: max(len(names), 1)]
        return self._forward("logprobs", want, names, batch, settings, "temperature")

    def values(self, batch: Batch, *, gives: str | tuple[str, ...] = "values", **settings: Any) -> Batch:
        """Return the values of the rows, computed by the role's trainer. They are None if it isn't due."""
        names = (gives,) if isinstance(gives, str) else tuple(gives)
        return self._forward("values", ("values",), names, batch, settings)

    def _due(self, session: Session, node: str, settings: Mapping[str, Any]) -> bool:
        """Return whether a call without settings of its own is due. Raises FlowError if it has any."""
        due, unknown = session.due(node, settings)
        known = {"gives": None, **methods.SCHEDULE}
        FlowError.refuse(methods.unknown_setting(node, name, known, call_place()) for name in unknown)
        return due

    def _forward(
        self,
        method: str,
        want: tuple[str, ...],
        gives: tuple[str, ...],
        batch: Batch,
        settings: Mapping[str, Any],
        *optional: str,
    ) -> Batch:
        session, _, node = self._call(method)
        if not self._due(session, node, settings):
            return renamed(node, Batch(real(node, batch).axis, none_of(want)), gives)
        inputs = present(node, model_reads(real(node, batch), *optional), real(node, batch).data)
        with failing(node, self._engine.iteration, inputs, call_place()):
            return renamed(node, self._engine.forward(self._name, want, inputs), gives)

    def __call__(self, batch: Batch, *, gives: str | tuple[str, ...] = "scores", **settings: Any) -> Batch:
        """Return the scores of the rows, as a batch with one column, which is None if the call isn't due."""
        session, _, node = self._call("")
        names = (gives,) if isinstance(gives, str) else tuple(gives)
        if not self._due(session, node, settings):
            return renamed(node, Batch(real(node, batch).axis, none_of(("scores",))), names)
        batch = present(node, real(node, batch), REWARD_READS)
        with failing(node, self._engine.iteration, batch, call_place()):
            result, metrics = self._engine.reward(self._name, batch)
        session.log(node, metrics, Of.REWARD, self._name)
        return renamed(node, result, names)

    def update(self, batch: Batch, loss: Loss | Sequence[Loss], **settings: Any) -> None:
        """Train the role on the rows of ``batch``, if the update is due.

        With several losses, each optimizer step minimizes their weighted sum.
        """
        session, call, node = self._call("update")
        if wrong := rules.no_losses(loss):
            raise FlowError(rules.not_a_loss(node, wrong[0], call_place()))
        if not isinstance(loss, Loss):
            loss, problems = joined(node, loss, settings, call_place())
            FlowError.refuse(problems)
        batch, specified = real(node, batch), specification(loss)
        own = methods.bind(
            node, specified, {k: v for k, v in settings.items() if k in specified}, call_place()
        )
        rest = checked(
            f"loss '{loss.name}'", loss.signature, {k: v for k, v in settings.items() if k not in specified}
        )
        # settings of the update itself are not passed to a loss
        rest = {name: value for name, value in rest.items() if name not in specified}
        if not methods.schedule_of(own).due(self._engine.iteration) or session.idle:
            return
        batch = Batch(batch.axis, batch.data | self._engine.state_batch(batch).data)
        fresh = resets(node, batch, own.pop("fresh_optimizer"))
        optional = [column.name for column in loss.signature.columns if column.optional]
        batch = present(node, batch, update_reads(loss), optional)
        check_columns(f"loss '{loss.name}'", loss.signature, batch, call_place(), loss.place)
        levels = {name: data.kind.level for name, data in batch.data.items()}
        FlowError.refuse(rules.torn_groups(loss, levels, node, call_place()))
        inputs = batch.select(*methods.MODEL_READS, "mask") | reads(update_reads(loss), batch)
        with failing(node, self._engine.iteration, inputs, call_place()):
            metrics, rows = self._engine.update(
                self._name, inputs, loss, UpdateOptions(**own), rest, call, fresh=fresh
            )
        session.stepped |= {self._name} if rows.stepped else set()
        session.log(node, {**metrics, **rows.metrics}, Of.UPDATE, self._name)


def resets(node: str, batch: Batch, column: str | None) -> bool:
    """Return whether an update starts with a fresh optimizer, as the scalar ``column`` says.

    Without a column, or if the column is None because its call isn't due, it doesn't. Raises FlowError if
    there is no such column, or if it isn't a single number.
    """
    if column is None or (column in batch and batch.data[column].value is None):
        return False
    check_columns(node, reading(column, Kind(Level.SCALAR)), batch, call_place(), None)
    return bool(batch.data[column].value)


# columns that must be there if a batch of prompts, or of rows to score, has them
MODEL_PROMPTS = ("prompt_tokens", "prefix_length")
REWARD_READS = (*methods.MODEL_READS, "completion", *methods.OF_EPISODES, *OF_PROMPTS)


def update_reads(loss: Loss) -> tuple[str, ...]:
    """Return the names of the columns that an update reads: the model's and the loss's."""
    return tuple(
        dict.fromkeys((*methods.MODEL_READS, "mask", "temperature", "group", *loss.signature.column_names))
    )


def _settings_of(flow: Flow, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return the settings that a flow was called with, or its own."""
    bound = inspect.signature(flow.function).bind(*arguments, **named).arguments
    return bound.get("hp", flow.parameters.hp)


class Eager:
    """Runs flows and stages that user code calls like functions.

    Implements `rlflow.author.scope.Interpreter`.
    """

    def call(self, flow: Flow, prompts: Any, roles: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Run one eager iteration of ``flow`` or, inside another flow, only its calls.

        Returns None if there was nothing to train on; the iteration counts all the same. If the flow
        raises an exception, the state is rolled back to what it was before the call.
        """
        if scope._current.get() is not None:
            return flow.function(prompts, *roles, **named)
        engine = next((role._engine for role in (*roles, *named.values()) if isinstance(role, Role)), None)
        if engine is None:
            raise FlowError(
                Problem(
                    "eager-roles",
                    f"flow '{flow.name}' was called without its roles",
                    call_place(),
                    flow.place,
                    found=f"{len(roles) + len(named)} arguments",
                    expected=", ".join(flow.parameters.roles),
                    remedy="roles = rlflow.roles(flow, model=…, data=…); flow(roles.take(), **roles)",
                )
            )
        before, session = engine.flow_state, Session(engine)
        try:
            with scope.entered(session):
                result = flow.function(prompts, *roles, **named)
                session.follow(flow.kept(_settings_of(flow, (prompts, *roles), named)))
        except SkipIteration:
            engine.flow_state, result = before, None
        except BaseException:
            engine.flow_state = before
            raise
        else:
            engine.keep({}, session.memory)
        engine.iteration += 1
        return result

    def bare(self) -> OutsideFlow:
        """Return the scope for stages that are called outside any flow."""
        return OutsideFlow()
