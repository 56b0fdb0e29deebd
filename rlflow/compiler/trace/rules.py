"""The rules for legal flows: the conditions on each kind of call, and the problem for each violation."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlflow.author.columns import CLOCK, PROMPT_ID, TABLE, Kind, Level
from rlflow.author.dispatch import ALL, RANK0
from rlflow.author.joint import JointLoss
from rlflow.author.loss import Loss
from rlflow.author.methods import EPISODE_GIVES
from rlflow.author.signature import ColumnParameter
from rlflow.author.stage import Stage
from rlflow.author.words import COLUMNS, column_meant
from rlflow.compiler.graph.ancestry import line
from rlflow.compiler.graph.model import Column, Graph, Node, Op, Output, RowAxis
from rlflow.errors import Place, Problem, listed, nearest

if TYPE_CHECKING:
    from rlflow.rewards.environments.environment_spec import EnvironmentSpec


def missing(
    what: str,
    name: str,
    columns: Sequence[str],
    place: Place | None,
    definition: Place | None,
    settings: Iterable[str],
) -> Problem:
    """Return the problem of a call that reads a column that the batch does not have.

    A setting that is written as a positional parameter also counts as such a column."""
    close = column_meant(name, columns)
    if name in EPISODE_GIVES:
        return no_environment(what, name, columns, place, definition)
    if name in settings and name not in TABLE:
        return Problem(
            "positional-setting",
            f"{what} reads '{name}' as a column, but '{name}' is a setting",
            place,
            definition,
            found=f"the positional parameter '{name}'",
            expected=f"one of {listed(columns)}",
            nearest=close,
            remedy=f"put '{name}' after '*' in the function's parameters and pass it by name: "
            f"{name}=hp.{name}",
        )
    if name not in TABLE and close is None and (here := COLUMNS.get(name)):
        remedy = f"read '{here}', which is its name in rlflow, and merge the stage that gives it first"
    # the parameters of a function before its '*' name columns
    elif name not in TABLE and close is None and definition is not None:
        remedy = f"merge the stage that gives '{name}' first, or put '{name}' after '*' if it is a setting"
    else:
        first = f"merge the stage that gives it first: batch |= <stage giving '{name}'>(batch)"
        remedy = f"read '{close}'" if close and name not in TABLE else first
    return Problem(
        "missing-column",
        f"{what} needs column '{name}', but the batch does not have it",
        place,
        definition,
        found=f"columns {listed(columns)}",
        expected=f"column '{name}'",
        nearest=close,
        remedy=remedy,
    )


def no_environment(
    what: str, name: str, columns: Sequence[str], place: Place | None, definition: Place | None
) -> Problem:
    """Return the problem of reading a column of episodes although the role that samples has no
    environment."""
    return Problem(
        "missing-column",
        f"{what} needs column '{name}', which exists only with an environment",
        place,
        definition,
        found=f"columns {listed(columns)}",
        expected="an environment for the role that samples",
        remedy="--env FILE.py:Class; docs/environments.md explains how to write one",
    )


def reward_missing(
    what: str,
    name: str,
    columns: Sequence[str],
    place: Place | None,
    definition: Place | None,
    fields: Sequence[str] = (),
) -> Problem:
    """Return the problem of a reward function that reads a column that the rows do not have.

    All parameters of a reward function name columns, before and after a ``*``.
    """
    if name in EPISODE_GIVES:
        return no_environment(what, name, columns, place, definition)
    meant = column_meant(name, columns)
    field = nearest(name, fields)
    ways = [f"name the parameter '{meant}'" if meant else "give the parameter a default"]
    ways += [
        f"--data.answer {name if name != 'answer' else 'FIELD'} if that field of the data is the right answer"
    ] * (name == "answer" or meant == "answer")
    ways += [f"map a field of the data: --data.{name} {field or 'FIELD'}"] * (name not in TABLE)
    return Problem(
        "missing-column",
        f"{what} needs column '{name}', but the rows do not have it",
        place,
        definition,
        found=f"columns {listed(columns)}" + (f"; fields of the data {listed(fields)}" if fields else ""),
        expected=f"column '{name}'" + (", or a field of the data of that name" if fields else ""),
        nearest=meant or field,
        remedy="; or ".join(ways),
    )


def optional_absent(what: str, name: str, place: Place | None, definition: Place | None) -> Problem:
    """Return the note that an optional column is absent."""
    return Problem(
        "optional-absent",
        f"{what} runs without its optional column '{name}'",
        place,
        definition,
        found="no such column",
        expected=f"column '{name}' or none",
        remedy="nothing, if this is intended",
        severity="note",
    )


def wrong_kind(
    what: str, parameter: ColumnParameter, kind: Kind | None, place: Place | None, definition: Place | None
) -> Problem:
    """Return the problem of a column that is read as a kind other than its own."""
    return Problem(
        "wrong-kind",
        f"{what} expects another kind of column '{parameter.name}'",
        place,
        definition,
        found=f"{parameter.name}: {kind}",
        expected=f"{parameter.name}: {parameter.kind}",
        remedy="change the stage that gives it, or annotate the parameter with the intended kind",
    )


def table_kind(
    what: str, name: str, kind: Kind | None, table: Kind | None, place: Place | None, definition: Place | None
) -> Problem:
    """Return the problem of a standard column that is given with a kind other than its standard kind."""
    return Problem(
        "table-kind",
        f"{what} gives the standard column '{name}' another kind",
        place,
        definition,
        found=f"{name}: {kind}",
        expected=f"{name}: {table}",
        remedy="use another name, or the kind of the standard column",
    )


OF_THE_DATA = ("prompt", "prompt_tokens")  # columns that only the data give


def gives_prompt(what: str, name: str, place: Place | None, definition: Place | None) -> Problem:
    """Return the problem of a flow that gives a prompt column itself.

    Models would silently still sample from the data's prompts.
    """
    return Problem(
        "gives-prompt",
        f"{what} gives '{name}', but models sample from the prompts of the data and never read this column",
        place,
        definition,
        found=f"a column '{name}' made by the flow",
        expected=f"'{name}' from the data, or from ask",
        remedy='give the column another name, such as "question", and sample from ask(batch, "question")',
    )


OF_THE_RUN = (*CLOCK, PROMPT_ID)  # columns that only the run gives


def gives_run(what: str, name: str, place: Place | None, definition: Place | None) -> Problem:
    """Return the problem of a flow that gives a column that only the run may give, such as ``iteration``."""
    return Problem(
        "gives-run",
        f"{what} gives '{name}', but the run adds this column to every batch",
        place,
        definition,
        found=f"a column '{name}' made by the flow",
        expected=f"'{name}' from the run: {TABLE[name].meaning}",
        remedy="use another name, or read the run's column",
    )


def own_column(what: str, name: str, place: Place | None, definition: Place | None) -> Problem:
    """Return the note that a column is neither standard nor declared."""
    close = nearest(name, TABLE)
    return Problem(
        "own-column",
        f"{what} gives column '{name}', which is neither standard nor declared; its kind is taken from the "
        "first real batch",
        place,
        definition,
        found=name,
        expected="a standard column, or a declared kind",
        nearest=close,
        remedy=f'declare it: gives={{"{name}": row(torch.float32)}}',
        severity="note",
    )


def gives_count(
    what: str, names: Sequence[str], columns: Collection[str], place: Place | None, definition: Place | None
) -> Problem:
    """Return the problem of a call whose ``gives=`` names more or fewer columns than the stage gives."""
    return Problem(
        "gives-count",
        f"{what} gives {len(columns)} columns, not {len(set(names))}",
        place,
        definition,
        found=f"gives={tuple(names)!r}",
        expected=f"{len(columns)} names, for {listed(columns)}",
        remedy="name each column that the stage gives",
    )


def not_a_batch(what: str, value: object, place: Place | None) -> Problem:
    """Return the problem of a call with an argument other than a batch."""
    return Problem(
        "not-a-batch",
        f"{what} was called with something that is not a batch",
        place,
        found=type(value).__name__,
        expected="a batch",
        remedy="pass the batch; pass settings by name",
    )


def leaked(place: Place | None) -> Problem:
    """Return the problem of a batch that is used outside the flow or body that made it."""
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
    """Return the problem of a `generate` call on sampled rows that are not prompts."""
    return Problem(
        "not-prompts",
        f"{what} is called on rows that are already sampled",
        place,
        found="rows of a group",
        expected="the prompts, or follow-up prompts made by `ask`",
        remedy=f'call {what}(prompts, …), or make prompts from the rows: {what}(ask(batch, "question"), …)',
    )


def no_losses(loss: object) -> list[object]:
    """Return the values in the ``loss`` argument of `update` (one or several) that are not losses."""
    losses = list(loss) if isinstance(loss, tuple | list) and loss else [loss]
    return [each for each in losses if not isinstance(each, Loss)]


def not_a_loss(what: str, value: object, place: Place | None) -> Problem:
    """Return the problem of an `update` call with something other than a loss."""
    return Problem(
        "not-a-loss",
        f"{what} needs a loss after the batch",
        place,
        found=getattr(value, "__name__", type(value).__name__),
        expected="a function decorated with @loss",
        remedy="decorate it with @loss",
    )


def other_rows(columns: Iterable[str], tokens: Sequence[str], place: Place | None) -> Problem:
    """Return the problem of merging two batches with unrelated rows."""
    finding = f"token columns {listed(tokens)}" if tokens else f"columns {listed(columns)} of other rows"
    return Problem(
        "row-axes",
        "the two batches have different rows, so their columns cannot be merged",
        place,
        found=finding,
        expected="columns of the same rows, or row-level columns of the same prompts with one row per prompt",
        remedy="merge only columns given for these rows; for a baseline per prompt, merge only its scores: "
        'batch |= reward(greedy, gives="baseline")',
    )


def until_kind(kind: Kind | None) -> Kind:
    """Return the kind that a ``tokens_until`` column must have: a bool per token, or an integer per row."""
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


def joined_kinds(name: str, kinds: Sequence[Kind | None], place: Place | None) -> Problem | None:
    """Return the problem of joining columns with the same name and different kinds, or None."""
    known = {
        (Level.ROW if kind.level is Level.GROUP else kind.level, kind.family)
        for kind in kinds
        if kind is not None
    }
    if len(known) < 2:
        return None
    return Problem(
        "joined-kinds",
        f"column '{name}' has several kinds in the batches to join",
        place,
        found=listed(str(kind) for kind in kinds),
        expected="one kind",
        remedy=f'drop("{name}") from one, or rename it',
    )


def chosen_prompts(axes: Sequence[RowAxis], rows: int) -> bool:
    """Return True if rows are the given prompts or a selection of them."""
    return (
        all(axes[step].step == "chosen" or axes[step].parent is None for step in line(axes, rows))
        and not axes[rows].grouped
    )


def body_rows(axes: Sequence[RowAxis], rows: int, place: Place | None) -> Iterator[Problem]:
    """Yield the problem of a `repeat` body that returns follow-up prompts or joined rows.

    A `repeat` counts groups of prompts, so its body must return its prompts or rows sampled from them."""
    if any(axes[step].step in ("asked", "cut", "joined") for step in line(axes, rows)):
        yield Problem(
            "repeat-rows",
            "a `repeat` body returns follow-up prompts or joined rows",
            place,
            found="rows made from other rows",
            expected="rows sampled from the prompts of the body",
            remedy="call ask and concat after the `repeat`",
        )


def lacking_rows(name: str, kind: Kind | None, place: Place | None) -> Problem:
    """Return the problem of a merged column that has no value for some rows, and whose kind has no NaN."""
    return Problem(
        "rows-lacking",
        f"column '{name}' has no value for rows that were not chosen, or for tokens without a follow-up "
        "prompt",
        place,
        found=f"{name}: {kind}",
        expected="a float column, so that missing values can be NaN",
        remedy=f'give it as {{"{name}": row(torch.float32)}}',
    )


def no_keep(name: str, columns: Sequence[str], place: Place | None, definition: Place | None) -> Problem:
    """Return the problem of a `repeat` body that does not return the column ``keep``."""
    return Problem(
        "repeat-keep",
        f"the `repeat` body '{name}' does not return 'keep'",
        place,
        definition,
        found=listed(columns),
        expected="the group column keep: bool",
        nearest=nearest("keep", columns),
        remedy='merge a stage with rows="group" that gives "keep" before the body returns',
    )


def body_result(name: str, value: object, place: Place | None, definition: Place | None) -> Problem:
    """Return the problem of a `repeat` body that returns something other than a batch."""
    return Problem(
        "repeat-result",
        f"the `repeat` body '{name}' does not return a batch",
        place,
        definition,
        found=type(value).__name__,
        expected="a batch with the group column keep",
        remedy="return the batch",
    )


def state_in_body(what: str, names: Sequence[str], place: Place | None) -> Problem:
    """Return the problem of a stage that sets state inside a `repeat` body."""
    return Problem(
        "repeat-state",
        f"{what} sets state inside a `repeat` body",
        place,
        found=listed(names),
        expected="state that is only read",
        remedy="set it after the `repeat`",
    )


def state_as_column(what: str, name: str, place: Place | None) -> Problem:
    """Return the problem of reading state, ``iteration`` or ``progress`` as a column of a batch."""
    owner = "run" if name in CLOCK else "flow"
    return Problem(
        "state-as-column",
        f"'{name}' is state of the {owner} and not a column, so {what} does not have it",
        place,
        found=f"state '{name}'",
        expected="a parameter of that name",
        remedy=f"take '{name}' as a parameter of the stage or loss that needs it",
    )


def state_rows(
    what: str, name: str, kind: Kind | None, state: Kind | None, place: Place | None, definition: Place | None
) -> Problem:
    """Return the problem of a stage that gives a state that is not one number."""
    return Problem(
        "state-rows",
        f"{what} gives the state '{name}', but not as one number",
        place,
        definition,
        found=f"{name}: {kind}",
        expected=f"{name}: {state}",
        remedy="give one number, with dispatch=RANK0",
    )


def state_rules(
    stage: Stage, outputs: Sequence[Output], state: Iterable[str], place: Place | None
) -> Iterator[Problem]:
    """Yield problems of a stage that sets state; state must be set once for all ranks."""
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
    """Return the problem of an exception in the function that returns the initial state."""
    return Problem(
        "flow-state",
        f"the initial state of flow '{flow}' cannot be computed: {type(error).__name__}: {error}",
        place,
        found=type(error).__name__,
        expected="a function of the settings that returns numbers by name",
        remedy='write @flow(state=lambda hp: {"beta": hp.beta})',
    )


def role_rules(stage: Stage, roles: Sequence[str], place: Place | None) -> Iterator[Problem]:
    """Yield problems of a stage with ``on=``: the flow must have the role, and the first parameter must have
    its name."""
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
    """Yield the problem of a stage that gives a token column but reads no column with the same lengths."""
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
    """Yield problems of a stage's dispatch mode, of its columns' levels, and of groups."""
    what = f"stage '{stage.name}'"
    reads_groups = stage.rows == "group" or "group" in stage.signature.column_names
    levels = {output.name: output.kind.level for output in outputs if output.kind}
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
    if (reads_groups or grouped) and not axis.grouped:
        yield Problem(
            "no-groups",
            f"{what} works on groups, but these rows have none",
            place,
            stage.place,
            found="rows of the prompts",
            expected="rows made by generate, or pairs",
            remedy="call it on the batch that generate gives",
        )
    elif reads_groups and axis.samples == 1 and axis.step == "sampled":
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
    """Return the problem of a function over groups whose rows `choose` kept, so that a group may have one
    row."""
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
    """Yield problems of a loss with the rows of its update."""
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
    """Yield the problem of a loss over groups whose ``where`` column does not have one value per group.

    Such a loss must get complete groups.

    ``levels``: the levels of the columns by name; None if unknown.
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


def body_rules(graph: Graph, place: Place | None) -> Iterator[Problem]:
    """Yield problems of a `repeat` body that learns; the body may run any number of times, so it must not
    learn."""
    for node in graph.nodes:
        if node.writes:
            yield Problem(
                "repeat-update",
                f"'{node.name}' changes weights inside a `repeat` body",
                node.place,
                place,
                found=node.name,
                expected="sampling, scoring and stages",
                remedy="update after the `repeat`",
            )


def repeat_prompts(columns: Sequence[str], place: Place | None) -> Problem:
    """Return the problem of a `repeat` call on something other than the flow's own prompts."""
    return Problem(
        "repeat-prompts",
        "repeat draws fresh prompts from the data, so it must start from the data's prompts",
        place,
        found=f"columns made by the flow: {listed(columns)}" if columns else "rows that were sampled",
        expected="the prompts",
        remedy="pass the flow's own prompts, and make other columns inside the body",
    )


def replaced_unread(graph: Graph, replaced: Iterable[tuple[Column, Place | None]]) -> Iterator[Problem]:
    """Yield a problem for each column that was replaced by one of the same name before anything read it."""
    read = graph.readers().keys() | {item.column for item in graph.results}
    for column, place in replaced:
        giver = graph.nodes[column.node]
        if column not in read and not _read_within(giver, column.name):
            yield Problem(
                "replaced-unread",
                f"column '{column.name}' of '{giver.name}' is replaced before anything reads it",
                place,
                giver.place,
                found=f"a second '{column.name}'",
                expected="a reader between the two, or only one of them",
                remedy=f'rename one of them: gives="…", or drop("{column.name}")',
            )


def _read_within(node: Node, name: str) -> bool:
    """Return True if a column is the data's own, or was read in the `repeat` body that gives it."""
    if node.body is None:
        return node.op is Op.DATA
    inner = next(item.column for item in node.body.results if item.parameter == name)
    return inner in node.body.readers() or _read_within(node.body.nodes[inner.node], inner.name)


def never_read(graph: Graph, own: Mapping[str, Stage | Loss]) -> Iterator[Problem]:
    """Yield a problem for each column of the author's own stages that nothing reads."""
    readers = graph.readers()
    results = {item.column for item in graph.results}
    for node in graph.nodes:
        columns = [Column(node.id, output.name) for output in node.outputs]
        unread = [c.name for c in columns if c not in readers and c not in results]
        unread = [name for name in unread if name not in {slot.name for slot in graph.state}]
        if node.op is Op.STAGE and node.name in own and unread:
            yield Problem(
                "never-read",
                f"stage '{node.name}' gives {listed(unread)}, but nothing reads it",
                node.place,
                node.definition,
                found=listed(unread),
                expected="a later stage, loss or method that reads it",
                remedy="remove it, or read it",
                severity="warning",
            )


def no_such_call(sampling: Iterable[str], calls: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each `generate` call that the run's settings name and the flow does not have."""
    for call in sampling:
        if call not in calls:
            yield Problem(
                "no-such-generate",
                f"--{call}.… is for a call that the flow does not make at these settings",
                found=call,
                expected=f"one of {listed(calls)}",
                nearest=nearest(call, calls),
                remedy="name one of them, or remove the flag",
            )


# -- environments
# ------------------------------------------------------------------------------------------------------------

ONE_PER_ROW = (Level.TEXT, Level.ROW, Level.GROUP, Level.SCALAR)


def environment_missing(
    environment: EnvironmentSpec,
    name: str,
    columns: Sequence[str],
    place: Place | None,
    fields: Sequence[str],
) -> Problem:
    """Return the problem of a ``reset`` that reads a column or field that the prompts do not have."""
    close = nearest(name, [*columns, *fields])
    return Problem(
        "missing-column",
        f"the environment {environment.name} reads '{name}', but the prompts do not have it",
        place,
        environment.place,
        found=f"columns {listed(columns)}" + (f"; fields of the data {listed(fields)}" if fields else ""),
        expected=f"column '{name}', or a field of the data of that name",
        nearest=close,
        remedy=f"map a field of the data: --data.{name} FIELD; or give the parameter of reset a default",
    )


def environment_kind(environment: EnvironmentSpec, name: str, kind: Kind, place: Place | None) -> Problem:
    """Return the problem of a ``reset`` that reads a column with more than one value per row."""
    return Problem(
        "wrong-kind",
        f"the environment {environment.name} reads column '{name}', which is not a row column",
        place,
        environment.place,
        found=f"{name}: {kind}",
        expected="text, or one number per row",
        remedy="read the text of the prompt",
    )


def environment_settings(
    environment: EnvironmentSpec, lengths: Sequence[int], what: str, place: Place | None
) -> Iterator[Problem]:
    """Yield the problem of recorded lengths together with an environment, which ends its own episodes."""
    if lengths:
        yield Problem(
            "env-lengths",
            f"{what} has recorded lengths and the environment {environment.name}",
            place,
            environment.place,
            found="lengths",
            expected="one of the two: an environment decides how long its episodes are",
            remedy="remove lengths",
        )


def environment_roles(
    graph: Graph, environments: Mapping[str, EnvironmentSpec], nodes: Iterable[Node]
) -> Iterator[Problem]:
    """Yield a problem for each ``--env`` flag that is ambiguous or names a role that does not sample."""
    sampling = list(dict.fromkeys(node.role or "" for node in nodes if node.op is Op.GENERATE))
    for role, environment in environments.items():
        unnamed = [each for each in sampling if each not in environments]
        if not role and len(unnamed) > 1:
            yield Problem(
                "env-role",
                f"several roles sample, and --env does not name the role that {environment.name} answers",
                definition=environment.place,
                found=listed(unnamed),
                expected="an environment with the name of its role",
                remedy=f"--{unnamed[0]}.env instead of --env",
            )
        if role not in sampling if role else not sampling:
            yield Problem(
                "env-role",
                f"role '{role}' does not sample, so no environment can answer it"
                if role
                else f"flow '{graph.name}' does not sample, so no environment can answer",
                definition=environment.place,
                found=f"roles that sample: {listed(sampling)}",
                expected="a role that samples",
                nearest=nearest(role, sampling),
                remedy=f"--{sampling[0]}.env" if sampling else "remove --env",
            )
