"""``@flow``, which turns a function of prompts, roles and settings into an iteration; also `repeat`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

from rlflow.author import source_lines
from rlflow.author.columns import Kind, checked_kinds
from rlflow.author.memory import Kept, stores
from rlflow.author.scope import current, engines
from rlflow.errors import FlowError, Place, Problem, nearest


@dataclass(frozen=True)
class Parameters:
    """The parameters of a flow: the data, the roles in order, ``*roles`` (``rest``), and the settings.

    ``hp`` is the default of the settings parameter, or None if the flow has no settings. ``memories``: the
    parameters that ``@flow(keeps=…)`` names.
    """

    data: str
    roles: tuple[str, ...]
    rest: str | None = None
    hp: Any = None
    memories: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Flow:
    """The result of ``@flow``.

    To run one iteration, call it with a batch of prompts and role objects from ``rlflow.config.roles``.
    """

    function: Callable[..., Any]
    data: Mapping[str, Kind] = field(default_factory=dict)
    state: Callable[[Any], Mapping[str, float]] | None = None
    evaluate: Callable[..., Any] | None = None
    keeps: Callable[[Any], Mapping[str, Kept]] | None = None
    trains: bool = True  # False: the flow need not update a role; `rlflow eval` has such a flow

    def __post_init__(self) -> None:
        vars(self).update(
            __name__=self.function.__name__, __doc__=self.function.__doc__, __wrapped__=self.function
        )

    def __call__(self, prompts: Any, /, *roles: Any, **named: Any) -> Any:
        """Run one iteration on a batch of prompts, and return what the flow's function returns.

        When called inside another flow, this flow's calls become part of the outer flow.
        """
        return engines().interpreter().call(self, prompts, roles, named)

    def graph(self, hp: Any = None) -> Any:
        """Return the graph of one iteration. ``hp`` defaults to the flow's own settings.

        Notebooks display the graph as a picture. Raises FlowError if the flow has errors.
        """
        return engines().tracer()(self, hp if hp is not None else self.parameters.hp).graph

    @property
    def name(self) -> str:
        """The name of the flow's function."""
        return self.function.__name__

    @property
    def place(self) -> Place:
        """The file and line where the flow is defined."""
        return source_lines.definition_place(self.function)

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters of the flow's function, sorted into data, roles, memories and settings.

        Raises FlowError if there is no data parameter, if ``hp`` isn't a dataclass, or if ``keeps`` names
        something that isn't a parameter.
        """
        listed = list(inspect.signature(self.function).parameters.values())
        if (
            not listed
            or listed[0].kind not in (listed[0].POSITIONAL_ONLY, listed[0].POSITIONAL_OR_KEYWORD)
            or listed[0].name == "hp"
        ):
            raise FlowError(
                Problem(
                    "flow-parameters",
                    f"flow '{self.name}' has no parameter for the data",
                    self.place,
                    found=f"({', '.join(p.name for p in listed)})",
                    expected="the data first, then roles",
                    remedy=f"write def {self.name}(prompts, actor, …, hp=Settings())",
                )
            )
        rest = next((p.name for p in listed if p.kind is p.VAR_POSITIONAL), None)
        roles = tuple(
            p.name
            for p in listed[1:]
            if p.name != "hp" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        )
        hp = next((p.default for p in listed if p.name == "hp" and p.default is not p.empty), None)
        if hp is not None and (isinstance(hp, type) or not dataclasses.is_dataclass(hp)):
            raise FlowError(
                Problem(
                    "flow-settings",
                    f"the settings of flow '{self.name}' are not a dataclass",
                    self.place,
                    found=f"hp={hp!r}",
                    expected="an object of a frozen dataclass",
                    remedy="write @dataclass(frozen=True) over the class, and hp=Settings() as the parameter",
                )
            )
        kept = stores(self.kept(hp))
        return Parameters(
            listed[0].name,
            tuple(name for name in roles if name not in kept),
            rest,
            hp,
            tuple(name for name in roles if name in kept),
        )

    def kept(self, hp: Any) -> dict[str, Kept]:
        """Return what the flow keeps across iterations with the settings ``hp``, by the name of its parameter.

        Raises FlowError if ``keeps`` raises, or returns something else, or names no parameter of the flow.
        """
        if self.keeps is None:
            return {}
        try:
            kept = dict(self.keeps(hp))
        except FlowError:
            raise
        except Exception as error:
            raise FlowError(self._wrong_keeps(f"{type(error).__name__}: {error}")) from error
        names = [name for name in inspect.signature(self.function).parameters if name != "hp"][1:]
        for name, value in kept.items():
            if not isinstance(value, Kept):
                raise FlowError(self._wrong_keeps(f"{name!r}: {value!r}"))
            if name not in names:
                taken = name in inspect.signature(self.function).parameters
                raise FlowError(
                    Problem(
                        "keeps-parameter",
                        f"flow '{self.name}' keeps '{name}', but that parameter is for its data or settings"
                        if taken
                        else f"flow '{self.name}' keeps '{name}', but has no parameter of that name",
                        self.place,
                        found=f"({', '.join(names)})",
                        expected="another name" if taken else f"a parameter {name}",
                        nearest=nearest(name, names),
                        remedy="rename it in keeps=, and add a parameter of the new name after the roles"
                        if taken
                        else f"add {name} to the parameters of {self.name}, after the roles",
                    )
                )
        return kept

    def _wrong_keeps(self, found: str) -> Problem:
        return Problem(
            "keeps",
            f"what flow '{self.name}' keeps is not declared as tables, buffers or followed roles",
            self.place,
            found=found,
            expected='a function of the settings that returns {"seen": table(key="prompt_id", wins=0.0)}',
            remedy="write @flow(keeps=lambda hp: {…}) with table(…), buffer(…) or follow(…) for each name",
        )


@overload
def flow(function: Callable[..., Any], /) -> Flow: ...
@overload
def flow(
    *,
    data: Mapping[str, Kind] | None = None,
    state: Callable[[Any], Mapping[str, float]] | None = None,
    keeps: Callable[[Any], Mapping[str, Kept]] | None = None,
    evaluate: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Flow]: ...
def flow(
    function: Callable[..., Any] | None = None,
    /,
    *,
    data: Mapping[str, Kind] | None = None,
    state: Callable[[Any], Mapping[str, float]] | None = None,
    keeps: Callable[[Any], Mapping[str, Kept]] | None = None,
    evaluate: Callable[..., Any] | None = None,
) -> Any:
    """Turn a function of (prompts, roles…, hp) into a flow.

    data: columns that the flow reads from the data in addition to ``prompt`` and ``answer``, as name → kind.

    state: a function that takes the settings and returns name → initial value. rlflow carries these scalars
    over from each iteration to the next.

    keeps: a function that takes the settings and returns name → `table`, `buffer` or `follow`. The flow has a
    parameter of each name. It reads and writes tables and buffers: what an iteration writes, the next one
    reads. A role that follows another is used as any role, but not updated.

    evaluate: a function ``body(prompts, roles…) -> batch`` that replaces the usual evaluation of held-out
    prompts. Its batch must have the column ``scores``.
    """

    def make(function: Callable[..., Any]) -> Flow:
        return Flow(function, checked_kinds("@flow(data=…)", data or {}), state, evaluate, keeps)

    return make(function) if function is not None else make


def repeat(
    body: Callable[..., Any], prompts: Any, *, groups: int, tries: int, every: int = 1, after: int = 0
) -> Any:
    """Call ``body(prompts) -> batch`` until enough groups are kept.

    The first call gets ``prompts``, and later calls get new ones. The batch must have ``keep``, a bool group
    column that is True for groups to keep. Calls stop once ``groups`` groups are kept, or after ``tries``
    calls. Returns a batch of the kept groups, in prompt order. With fewer than ``groups``, the iteration
    trains on those and prints a warning; with none, it is skipped. With ``every=2, after=4``, the `repeat`
    only runs in iterations 4, 6, 8 and so on, and makes no rows in the others.
    """
    settings = {"groups": groups, "tries": tries, "every": every, "after": after}
    return current().repeat(body, prompts, settings)
