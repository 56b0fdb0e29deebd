"""The rules for calls of stages, methods and losses, with the problem for each violation.

In all functions, ``what`` is the name of the call, ``place`` is its line, and ``definition`` is the line of
the called function.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlflow.author.columns import Kind, Level
from rlflow.author.dispatch import ALL, RANK0
from rlflow.author.joint import JointLoss
from rlflow.author.loss import Loss
from rlflow.author.stage import Stage
from rlflow.compiler.graph.model import Output, RowAxis
from rlflow.errors import Place, Problem, listed, nearest


def not_a_batch(what: str, value: object, place: Place | None) -> Problem:
    """Return the problem of a call that gets something other than a batch."""
    return Problem(
        "not-a-batch",
        f"{what} was called with something that is not a batch",
        place,
        found=type(value).__name__,
        expected="a batch",
        remedy="pass the batch; pass settings by name",
    )


def leaked(place: Place | None) -> Problem:
    """Return the problem of using a batch outside the flow or `repeat` body that made it."""
    return Problem(
        "leaked-symbol",
        "a batch of another trace is used here: it was stored outside its flow, or passed into or out of "
        "a `repeat` body",
        place,
        found="a symbolic batch from elsewhere",
        expected="batches that this flow made, or that were passed to this body",
        remedy="pass batches as arguments; do not store them in globals, defaults or closures",
    )


def not_prompts(what: str, place: Place | None) -> Problem:
    """Return the problem of calling `generate` on sampled rows instead of prompts."""
    return Problem(
        "not-prompts",
        f"{what} is called on rows that are already sampled",
        place,
        found="rows of a group",
        expected="the prompts, or follow-up prompts made by `ask`",
        remedy=f'call {what}(prompts, …), or make prompts from the rows: {what}(ask(batch, "question"), …)',
    )


def no_losses(loss: object) -> list[object]:
    """Return whatever isn't a loss in the ``loss`` argument of `update`.

    It may be a single loss, or a list or tuple of losses.
    """
    losses = list(loss) if isinstance(loss, tuple | list) and loss else [loss]
    return [each for each in losses if not isinstance(each, Loss)]


def not_a_loss(what: str, value: object, place: Place | None) -> Problem:
    """Return the problem of an `update` call that gets something other than a loss."""
    return Problem(
        "not-a-loss",
        f"{what} needs a loss after the batch",
        place,
        found=getattr(value, "__name__", type(value).__name__),
        expected="a function decorated with @loss",
        remedy="decorate it with @loss",
    )


def until_kind(kind: Kind | None) -> Kind:
    """Return the kind that a ``tokens_until`` column must have: a bool per token, or an integer per row.

    ``kind``: the kind that it has.
    """
    return (
        Kind(Level.TOKEN, "bool")
        if kind is not None and kind.level is Level.TOKEN
        else Kind(Level.ROW, "int64")
    )


def choose_groups(place: Place | None) -> Problem:
    """Return the problem of calling `choose(…, per="group")` on rows without groups."""
    return Problem(
        "no-groups",
        'choose with per="group" needs groups, but these rows have none',
        place,
        found="rows of the prompts",
        expected="rows made by generate, or pairs",
        remedy='remove per="group", or choose among sampled rows',
    )


def state_rules(
    stage: Stage, outputs: Sequence[Output], state: Iterable[str], place: Place | None
) -> Iterator[Problem]:
    """Yield problems with a stage that sets state, which must be one value for all ranks.

    ``state``: names of the state scalars.
    """
    names = [output.name for output in outputs if output.name in set(state)]
    if names and stage.dispatch == ALL:
        yield Problem(
            "state-dispatch",
            f"stage '{stage.name}' sets state on every rank",
            place,
            stage.place,
            found=f"{listed(names)} under {stage.dispatch}",
            expected="RANK0",
            remedy="write dispatch=RANK0",
        )


def state_raised(flow: str, error: BaseException, place: Place | None) -> Problem:
    """Return the problem of a flow whose ``state`` function raises."""
    return Problem(
        "flow-state",
        f"the initial state of flow '{flow}' cannot be computed: {type(error).__name__}: {error}",
        place,
        found=type(error).__name__,
        expected="a function of the settings that returns numbers by name",
        remedy='write @flow(state=lambda hp: {"beta": hp.beta})',
    )


def role_rules(stage: Stage, roles: Sequence[str], place: Place | None) -> Iterator[Problem]:
    """Yield problems with a stage that has ``on=``.

    The flow must have that role, and the stage's first parameter must have its name.
    """
    if stage.on is None:
        return
    what, first = f"stage '{stage.name}'", next(iter(inspect.signature(stage.function).parameters), "nothing")
    if stage.on not in roles:
        yield Problem(
            "unknown-role",
            f"{what} runs on the role '{stage.on}', but this flow does not have it",
            place,
            stage.place,
            found=stage.on,
            expected=f"one of {listed(roles)}",
            nearest=nearest(stage.on, roles),
            remedy="name a role of the flow in on=, or add this role to the flow's parameters",
        )
    if first != stage.on:
        yield Problem(
            "role-parameter",
            f"{what} runs on the role '{stage.on}', but its first parameter is not that role",
            place,
            stage.place,
            found=first,
            expected=f"{stage.on} as the first parameter",
            remedy=f"write def {stage.name}({stage.on}, …)",
        )


def length_rules(
    stage: Stage, outputs: Sequence[Output], reads: Sequence[Kind | None], place: Place | None
) -> Iterator[Problem]:
    """Yield a problem if a stage returns a token column without reading one of the same lengths.

    ``reads``: the kinds of columns that the stage reads.
    """
    for level in (Level.TOKEN, Level.PROMPT):
        names = [output.name for output in outputs if output.kind and output.kind.level is level]
        if names and all(kind is not None and kind.level is not level for kind in reads):
            yield Problem(
                "unknown-lengths",
                f"stage '{stage.name}' gives a value per {level}, but reads no such column, so the lengths "
                "are unknown",
                place,
                stage.place,
                found=f"{listed(names)}, from {listed(stage.signature.column_names)}",
                expected=f"a column of {level} level among its parameters",
                remedy="add `mask` to its parameters"
                if level is Level.TOKEN
                else "add `prompt_tokens` to its parameters",
            )


def stage_rules(
    stage: Stage, outputs: Sequence[Output], axis: RowAxis, place: Place | None
) -> Iterator[Problem]:
    """Yield problems with a stage's dispatch mode, its columns' levels, and its groups."""
    levels = {output.name: output.kind.level for output in outputs if output.kind}
    yield from _dispatch_rules(stage, levels, place)
    yield from _group_rules(stage, Level.GROUP in levels.values(), axis, place)


def _dispatch_rules(stage: Stage, levels: Mapping[str, Level], place: Place | None) -> Iterator[Problem]:
    """Yield problems with columns whose level doesn't fit their stage's dispatch mode."""
    what = f"stage '{stage.name}'"
    rowwise = [name for name, level in levels.items() if level is not Level.SCALAR]
    if stage.dispatch == ALL and rowwise:
        yield Problem(
            "all-gives-rows",
            f"{what} runs on every rank (ALL), but gives values per row",
            place,
            stage.place,
            found=listed(rowwise),
            expected="scalar columns only",
            remedy="use DP_COMPUTE for rows, or give a scalar",
        )
    scalars = [name for name, level in levels.items() if level is Level.SCALAR]
    if scalars and stage.dispatch not in (ALL, RANK0):
        yield Problem(
            "scalar-dispatch",
            f"{what} gives one value for the full batch, but sees only its part of the rows",
            place,
            stage.place,
            found=f"{listed(scalars)} under {stage.dispatch}",
            expected="RANK0 or ALL",
            remedy="write dispatch=RANK0",
        )
    grouped = [name for name, level in levels.items() if level is Level.GROUP]
    if grouped and stage.dispatch != RANK0 and stage.rows != "group":
        yield Problem(
            "group-dispatch",
            f"{what} gives group columns, but may see only a part of a group",
            place,
            stage.place,
            found=listed(grouped),
            expected='rows="group" or RANK0',
            remedy='write rows="group"',
        )


def _group_rules(stage: Stage, gives_groups: bool, axis: RowAxis, place: Place | None) -> Iterator[Problem]:
    """Yield a problem if a stage works on groups but its rows have none, or ones that are too small."""
    what = f"stage '{stage.name}'"
    reads_groups = stage.rows == "group" or "group" in stage.signature.column_names
    if (reads_groups or gives_groups) and not axis.grouped:
        yield Problem(
            "no-groups",
            f"{what} works on groups, but these rows have none",
            place,
            stage.place,
            found="rows of the prompts",
            expected="rows made by generate, or pairs",
            remedy="call it on the batch that generate gives",
        )
    elif reads_groups and axis.samples == 1 and axis.step in ("sampled", "encoded"):
        yield Problem(
            "single-groups",
            f"{what} works on groups, but each group has one row",
            place,
            stage.place,
            found="samples=1",
            expected="samples of at least 2",
            remedy="sample more responses per prompt: generate(…, samples=8)",
        )
    elif reads_groups and axis.step == "chosen" and not axis.samples:
        yield thin_groups(what, place, stage.place)
    elif reads_groups and stage.rows == "row" and stage.dispatch != RANK0:
        yield Problem(
            "group-split",
            f"{what} reads 'group', but gets single rows, so a group may be split over ranks",
            place,
            stage.place,
            found='rows="row"',
            expected='rows="group" or RANK0',
            remedy='write rows="group"',
            severity="warning",
        )


def thin_groups(what: str, place: Place | None, definition: Place | None) -> Problem:
    """Return the problem of working on groups of which `choose` kept only some rows, maybe just one."""
    return Problem(
        "thin-groups",
        f"{what} works on groups, but choose may leave groups of a single row",
        place,
        definition,
        found="rows that were chosen",
        expected="statistics that allow a group of one row: its deviation is 0, the mean of the others is NaN",
        remedy="nothing, if this is intended; or compute on groups before choosing",
        severity="note",
    )


def update_rules(loss: Loss, axis: RowAxis, what: str, place: Place | None) -> Iterator[Problem]:
    """Yield a problem if a loss over groups gets rows without groups, or groups that can be a single row."""
    if loss.rows == "group" and not axis.grouped:
        yield Problem(
            "no-groups",
            f"loss '{loss.name}' works on groups, but these rows have none",
            place,
            loss.place,
            found="rows of the prompts",
            expected="rows made by generate, or pairs",
            remedy=f"pass {what} the batch that generate gives",
        )
    elif loss.rows == "group" and axis.step == "chosen" and not axis.samples:
        yield thin_groups(f"loss '{loss.name}'", place, loss.place)
    elif loss.rows == "group" and axis.samples == 1:
        yield Problem(
            "single-groups",
            f"loss '{loss.name}' works on groups, but each group has one row",
            place,
            loss.place,
            found="samples=1",
            expected="samples of at least 2",
            remedy="sample more responses per prompt",
        )


def torn_groups(
    loss: Loss, levels: Mapping[str, Level | None], what: str, place: Place | None
) -> Iterator[Problem]:
    """Yield a problem if a loss over groups has a ``where`` column without one value per group.

    Such a loss needs complete groups. ``levels``: each column's level, or None if unknown.
    """
    parts = zip(loss.losses, loss.where, strict=True) if isinstance(loss, JointLoss) else ()
    for part, name in parts:
        level = levels.get(name) if name is not None else None
        if part.rows == "group" and level not in (None, Level.GROUP):
            yield Problem(
                "torn-groups",
                f"loss '{part.name}' works on groups, but where='{name}' may select parts of groups",
                place,
                part.place,
                found=f"'{name}' with one value per {level}",
                expected="a group column of bool, or no where",
                remedy=f"give '{name}' as group(bool), in a stage with rows=\"group\"; or choose the rows "
                f"before {what}",
            )
