"""The symbolic batches, roles and columns that a flow is called with while it is traced.

A symbolic batch maps each column's name to the node that computes it. It has no rows, so using it as a value
raises FlowError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from rlflow.author.columns import PROMPT_ID, Kind, Level
from rlflow.author.methods import METHODS, unknown_setting
from rlflow.author.node_options import DrawOptions
from rlflow.author.signature import REQUIRED
from rlflow.author.source_lines import call_place
from rlflow.compiler.graph.model import SETTING, Column, Input, Node, RowAxis
from rlflow.compiler.trace import rules
from rlflow.errors import FlowError, Place, Problem, nearest

if TYPE_CHECKING:
    from rlflow.author.loss import Loss
    from rlflow.author.memory import Buffer, Table
    from rlflow.compiler.trace.graph_recorder import GraphRecorder
    from rlflow.compiler.trace.tracer import Tracer


@dataclass(frozen=True)
class ColumnSource:
    """A column of a symbolic batch: the node that computes it, and its kind if known."""

    column: Column
    kind: Kind | None


class DroppedColumn(NamedTuple):
    """A column that `concat` dropped: its kind, the place of the call, and which batches don't have it."""

    kind: Kind | None
    place: Place | None
    lacking: str


@dataclass
class RecordedGraph:
    """The nodes of a flow, or of a `repeat` body, as recorded in program order.

    ``replaced``: (column, place) for each column that another of the same name has replaced. ``dropped``: for
    each axis of joined rows, the columns that only some of the batches had: name → their kind, the place of
    the `concat`, and which batches lack the column. ``clock``: the scalars ``iteration`` and ``progress``,
    empty until something reads them.
    """

    nodes: list[Node] = field(default_factory=list)
    axes: list[RowAxis] = field(default_factory=list)
    replaced: list[tuple[Column, Place | None]] = field(default_factory=list)
    dropped: dict[int, dict[str, DroppedColumn]] = field(default_factory=dict)
    clock: dict[str, ColumnSource] = field(default_factory=dict)


def refuse(use: str, remedy: str) -> NoReturn:
    """Raise FlowError because user code uses a traced batch, which has no rows, as a value.

    ``use``: how the code uses it.
    """
    raise FlowError(
        Problem(
            "symbol-as-value",
            f"a batch has no rows while the flow is traced, so it cannot be used {use}",
            call_place(),
            found=f"a batch used {use}",
            expected="stages, role methods, merges and settings only",
            remedy=remedy,
        )
    )


INTO_STAGE = "put the computation inside a @stage"
DECISION = "put the decision inside a @stage, or base it on a setting"


class Symbol:
    """Stands for a value while a flow is traced. If Python or torch uses it as one, it raises FlowError."""

    symbolic = True

    def __bool__(self) -> bool:
        refuse("in a condition", DECISION)

    def __len__(self) -> int:
        refuse("with len()", "base the number on a setting")

    def __iter__(self) -> Any:
        refuse("in a loop", "loop over a setting, or inside a @stage")

    def __float__(self) -> float:
        refuse("as a number", INTO_STAGE)

    def __int__(self) -> int:
        refuse("as a number", INTO_STAGE)

    def __index__(self) -> int:
        refuse("as a number", INTO_STAGE)

    def __setitem__(self, name: Any, value: Any) -> None:
        refuse(
            "as a place to write to",
            "a batch is immutable: merge the result of a stage with batch |= stage(batch)",
        )

    def __eq__(self, other: object) -> bool:
        refuse("in a comparison", DECISION)

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        refuse("as an array", INTO_STAGE)

    @classmethod
    def __torch_function__(cls, *arguments: Any, **options: Any) -> Any:
        refuse("in a torch function", INTO_STAGE)


def _arithmetic(self: Any, *others: Any) -> Any:
    refuse("in arithmetic", INTO_STAGE)


def _comparison(self: Any, other: Any) -> Any:
    refuse("in a comparison", DECISION)


_OPERATORS = (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "divmod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
for _name in _OPERATORS:
    setattr(Symbol, f"__{_name}__", _arithmetic)
    setattr(Symbol, f"__r{_name}__", _arithmetic)
for _name in ("neg", "pos", "abs", "invert", "round"):
    setattr(Symbol, f"__{_name}__", _arithmetic)
for _name in ("lt", "le", "gt", "ge"):
    setattr(Symbol, f"__{_name}__", _comparison)


class SymbolicColumn(Symbol):
    """A column of a symbolic batch, as returned by ``batch["name"]``.

    A scalar can be passed as a setting of a call. If the batch doesn't have the column, ``source`` is None
    and the problem is reported.
    """

    def __init__(
        self, name: str, source: ColumnSource | None = None, recorded: RecordedGraph | None = None
    ) -> None:
        self.name = name
        self.source = source
        self.recorded = recorded

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"with .{name}", INTO_STAGE)

    def __repr__(self) -> str:
        return f"<column {self.name}, not known while tracing>"


class SymbolicBatch(Symbol):
    """A batch while a flow is traced: its row axis, and the node that computes each column."""

    def __init__(
        self, tracer: GraphRecorder, recorded: RecordedGraph, axis: int, sources: Mapping[str, ColumnSource]
    ) -> None:
        self.tracer = tracer
        self.recorded = recorded
        self.axis = axis
        self.sources = dict(sources)

    @property
    def columns(self) -> dict[str, Kind | None]:
        """Each column's kind by name, or None if it isn't known yet."""
        return {name: source.kind for name, source in self.sources.items()}

    def __contains__(self, name: object) -> bool:
        self.tracer.reads_prompt_id |= name == PROMPT_ID
        return name in self.sources

    def __getitem__(self, name: str) -> SymbolicColumn:
        if not isinstance(name, str):
            refuse("with an index", INTO_STAGE)
        return SymbolicColumn(
            name, self.tracer.scalar(name) or self.tracer.find(self, name, "batch[…]"), self.recorded
        )

    def select(self, *names: str) -> SymbolicBatch:
        """Return a batch with only these columns."""
        return self._with(
            {name: source for name in names if (source := self.tracer.find(self, name, "select"))}
        )

    def drop(self, *names: str) -> SymbolicBatch:
        """Return a batch without these columns."""
        for name in names:
            self.tracer.find(self, name, "drop")
        return self._with({name: source for name, source in self.sources.items() if name not in names})

    def rename(self, **names: str) -> SymbolicBatch:
        """Rename columns: ``rename(old="new")``."""
        return self.tracer.rename(self, names)

    def __or__(self, other: Any) -> Any:
        if not isinstance(other, SymbolicBatch):
            refuse(
                "with '|' on something that is not a batch",
                "merge the result of a stage: batch |= stage(batch)",
            )
        return self.tracer.merge(self, other)

    def _with(self, sources: Mapping[str, ColumnSource]) -> SymbolicBatch:
        return SymbolicBatch(self.tracer, self.recorded, self.axis, sources)

    def __getattr__(self, name: str) -> Any:
        if name in ("rows", "repeat", "chunk", "concat"):
            refuse(f"with .{name}()", INTO_STAGE)
        if name.startswith("__"):
            raise AttributeError(name)
        options = ("select", "drop", "rename", "columns")
        there = name in self.tracer.visible(self)
        one = self.tracer.scalar(name) is not None
        raise FlowError(
            Problem(
                "unknown-attribute",
                f"a batch has no attribute '{name}'" + (", but it has a column of that name" * there),
                call_place(),
                found=name,
                expected=", ".join(options),
                nearest=nearest(name, options),
                remedy=f'pass batch["{name}"] as a setting, or read it inside a @stage'
                if there and one
                else "read columns inside a @stage",
            )
        )

    def __repr__(self) -> str:
        kinds = ", ".join(f"{name}: {kind or 'own'}" for name, kind in self.columns.items())
        return f"Batch(traced; {kinds})"


class SymbolicRole:
    """A role while a flow is traced. Calling its methods adds nodes to the graph."""

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._name = name

    @property
    def weight(self) -> float:
        """This reward's weight from ``--reward X:WEIGHT``, or 1 if the role isn't in ``*rewards``."""
        return self._tracer.weight(self._name)

    def generate(self, prompts: Any, **settings: Any) -> Any:
        """Record a `generate` call of the role."""
        return self._tracer.generate(self._name, prompts, settings)

    def logprobs(self, batch: Any, *, gives: str | tuple[str, ...] = "logprobs", **settings: Any) -> Any:
        """Record a forward pass for log-probs, and for entropies if ``gives`` has two names."""
        return self._tracer.forward(self._name, "logprobs", batch, gives, settings)

    def values(self, batch: Any, *, gives: str | tuple[str, ...] = "values", **settings: Any) -> Any:
        """Record a forward pass for values."""
        return self._tracer.forward(self._name, "values", batch, gives, settings)

    def __call__(self, batch: Any, *, gives: str | tuple[str, ...] = "scores", **settings: Any) -> Any:
        """Record a reward call of the role."""
        return self._tracer.reward(self._name, batch, gives, settings)

    def update(self, batch: Any, loss: Loss | Sequence[Loss], **settings: Any) -> None:
        """Record an `update` call of the role. With several losses, each optimizer step uses all of them."""
        self._tracer.update(self._name, batch, loss, settings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise FlowError(
            Problem(
                "unknown-verb",
                f"role '{self._name}' has no method '{name}'",
                call_place(),
                found=name,
                expected=", ".join((*METHODS, f"{self._name}(batch)")),
                nearest=nearest(name, METHODS),
                remedy='use one of these methods, or a @stage(on="…") of your own',
            )
        )

    def __repr__(self) -> str:
        return f"<role {self._name}>"


class SymbolicStore:
    """A table or buffer while a flow is traced. Only its own methods can be called."""

    kind: ClassVar[str]
    calls: ClassVar[tuple[str, str]]  # its methods with their first arguments, such as "read(batch)"
    _name: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise FlowError(self._unknown(f"{self.kind} '{self._name}' has no method '{name}'", name))

    def __call__(self, *_: Any, **settings: Any) -> Any:
        """Refuse the call: it is no role."""
        raise FlowError(
            self._unknown(f"{self.kind} '{self._name}' is called like a role", f"{self._name}(…)")
        )

    def _unknown(self, message: str, found: str) -> Problem:
        return Problem(
            "unknown-verb",
            message,
            call_place(),
            found=found,
            expected=", or ".join(f"{self._name}.{call}" for call in self.calls),
            nearest=nearest(found, [call.partition("(")[0] for call in self.calls]),
            remedy=f"use one of these; if {self._name} is a role, give the {self.kind} another name in keeps=",
        )

    def __repr__(self) -> str:
        return f"<{self.kind} {self._name}>"


class SymbolicTable(SymbolicStore):
    """A table while a flow is traced. Its methods add nodes to the graph."""

    kind, calls = "table", ("read(batch)", "write(batch, …)")

    def __init__(self, tracer: Tracer, name: str, spec: Table) -> None:
        self._tracer = tracer
        self._name = name
        self._spec = spec

    def read(self, batch: Any, *, stale_ok: str | None = None, **unknown: Any) -> Any:
        """Record a read of the table's numbers for the key of each row."""
        problems = (
            unknown_setting(f"{self._name}.read", name, {"stale_ok": None}, call_place()) for name in unknown
        )
        self._tracer.report(*problems)
        return self._tracer.read(self._name, self._spec, batch, stale_ok)

    def write(self, batch: Any, **reducers: Any) -> None:
        """Record a write of columns of the batch, which takes effect when the iteration ends."""
        self._tracer.write(self._name, self._spec, batch, reducers)


class SymbolicBuffer(SymbolicStore):
    """A buffer while a flow is traced. Its methods add nodes to the graph."""

    kind, calls = "buffer", ("draw()", "put(batch)")

    def __init__(self, tracer: Tracer, name: str, spec: Buffer) -> None:
        self._tracer = tracer
        self._name = name
        self._spec = spec

    def draw(
        self,
        *,
        groups: int | None = None,
        rows: int | None = None,
        weight: str | None = None,
        strata: str | None = None,
        newest: bool = False,
    ) -> Any:
        """Record a draw of stored rows, and return them."""
        count = {"groups": groups, "rows": rows}
        return self._tracer.draw(self._name, self._spec, count, DrawOptions(None, weight, strata, newest))

    def put(self, batch: Any, *, also: Sequence[str] = ()) -> None:
        """Record that rows are put into the buffer, which takes effect when the iteration ends."""
        self._tracer.put(self._name, self._spec, batch, also)


@dataclass(frozen=True)
class CallSettings:
    """A call's settings: plain values, inputs for settings that are scalar columns, and problems.

    To keep tracing, a setting that is a column but mustn't be gets its default, or 1.
    """

    values: dict[str, Any]
    edges: tuple[Input, ...]
    problems: tuple[Problem, ...]

    def without_edges(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``bound`` without the settings that are columns."""
        columns = {item.parameter for item in self.edges}
        return {name: value for name, value in bound.items() if SETTING + name not in columns}


def call_settings(
    what: str,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    takes: Callable[[str], bool],
    recorded: RecordedGraph,
    place: Place | None,
) -> CallSettings:
    """Split a call's settings into plain values and columns. ``what`` names the call in messages.

    ``takes(name)`` tells whether a setting can be a column. Raises FlowError for columns from another trace.
    """
    values, edges, problems = dict(settings), [], []
    for name, column in settings.items():
        if not isinstance(column, SymbolicColumn):
            continue
        if column.recorded is not recorded:
            raise FlowError(rules.leaked(place))
        wrong = list(_column_problems(what, name, column, takes(name), recorded, place))
        del values[name]
        if wrong or column.source is None:
            default = defaults.get(name, REQUIRED)
            values[name] = 1 if default is REQUIRED else default
        else:
            edges.append(Input(SETTING + name, column.source.column))
        problems += wrong
    return CallSettings(values, tuple(edges), tuple(problems))


def _column_problems(
    what: str, name: str, column: SymbolicColumn, takes: bool, recorded: RecordedGraph, place: Place | None
) -> Iterator[Problem]:
    """Yield problems with a setting that is a column. ``takes``: whether it can be one."""
    argument = f'{name}=batch["{column.name}"]'
    if not takes:
        yield Problem(
            "setting-column",
            f"{what} needs '{name}' before anything runs, so it cannot be a column",
            place,
            found=argument,
            expected="a value, or a setting of the flow; only temperature, top_p and float settings of stages "
            "and losses may be columns",
            remedy=f"write {name}=hp.{name}",
        )
    elif column.source is not None and (other := _no_number(column, recorded)):
        yield Problem(
            "setting-column",
            f"{what} needs one number as '{name}', but the column is not one number",
            place,
            found=f"{argument}: {other}",
            expected="a state, or a scalar float column",
            remedy="give one number, in a stage with dispatch=RANK0 and "
            f'gives={{"{name}_now": scalar(torch.float32)}}',
        )


def _no_number(column: SymbolicColumn, recorded: RecordedGraph) -> str:
    """Return "" if the column is a single number for all ranks, and otherwise its kind as text."""
    assert column.source is not None
    kind = column.source.kind
    if kind is None or kind.level is not Level.SCALAR or kind.family == "bool":
        return str(kind or "a kind that is not declared")
    return "one number per rank" if recorded.nodes[column.source.column.node].dispatch == "ALL" else ""
