"""The rules for columns that calls read, return and merge, with the problem for each violation.

In all functions, ``what`` is the name of the call, ``place`` is its line, and ``definition`` is the line of
the called function.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rlflow.author.columns import CLOCK, PROMPT_ID, TABLE, Kind, Level
from rlflow.author.methods import EPISODE_GIVES
from rlflow.author.signature import ColumnParameter
from rlflow.author.words import COLUMNS, column_meant
from rlflow.errors import Place, Problem, listed, nearest


def missing(
    what: str,
    name: str,
    columns: Sequence[str],
    place: Place | None,
    definition: Place | None,
    settings: Iterable[str],
) -> Problem:
    """Return the problem of a call that reads a column that the batch doesn't have.

    ``columns``: those that it has. ``settings``: names of the flow's settings, to give a hint if a setting
    was written as a positional parameter.
    """
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
    """Return the problem of reading an episode column when the sampling role has no environment."""
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
    """Return the problem of a reward function that reads a column that the rows don't have.

    All parameters of a reward function name columns, even those after ``*``. ``fields``: the fields in the
    data's file.
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
    """Return the problem of a parameter that reads a column of the wrong kind."""
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
    """Return the problem of giving a standard column a kind other than its own, ``table``."""
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
    """Return the problem of a flow that computes a prompt column itself.

    Models would ignore it and sample from the data's prompts.
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
    """Return the problem of a flow that computes a column reserved for the run, such as ``iteration``."""
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
    """Return the problem of a call whose ``gives=`` doesn't have one name per returned column."""
    return Problem(
        "gives-count",
        f"{what} gives {len(columns)} columns, not {len(set(names))}",
        place,
        definition,
        found=f"gives={tuple(names)!r}",
        expected=f"{len(columns)} names, for {listed(columns)}",
        remedy="name each column that the stage gives",
    )


def other_rows(columns: Iterable[str], tokens: Sequence[str], place: Place | None) -> Problem:
    """Return the problem of merging two batches with unrelated rows.

    ``columns``: the merged columns. ``tokens``: the token columns among them.
    """
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


def joined_kinds(name: str, kinds: Sequence[Kind | None], place: Place | None) -> Problem | None:
    """Return the problem of joining columns of different kinds, or None if their kinds are equal."""
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


def unfillable(name: str, kind: Kind | None, value: object, place: Place | None) -> Problem | None:
    """Return the problem of filling a column with a value that it can't have, or None if it can.

    ``kind``: the column's kind in a batch that has it, or None if it isn't known yet.
    """
    if kind is None or kind.level in (Level.TEXT, Level.TOKEN, Level.ROW, Level.GROUP):
        family = "text" if kind is not None and kind.level is Level.TEXT else kind.family if kind else None
        own = FILLED[type(value)]
        if family is None or own == family or (own, family) in (("int", "float"), ("int", "uint")):
            return None
    return Problem(
        "concat-fill",
        f"concat cannot fill column '{name}' with {value!r}",
        place,
        found=f"{name}: {kind}",
        expected="a value of the column's kind, and a column with one value per token or row",
        remedy=f'write a value of this kind in fill={{"{name}": …}}, or give the column to each batch',
    )


FILLED = {bool: "bool", int: "int", float: "float", str: "text"}  # type → the family of columns it fills


def filled_nowhere(name: str, columns: Iterable[str], place: Place | None) -> Problem:
    """Return the problem of filling a column that no batch has. ``columns``: those that some batch has."""
    close = nearest(name, columns)
    return Problem(
        "concat-fill",
        f"concat fills column '{name}', but none of the batches has it",
        place,
        found=f'fill={{"{name}": …}}',
        expected=f"one of {listed(columns)}",
        nearest=close,
        remedy=f"fill '{close}'" if close else "remove it from fill",
    )


def no_common_prompts(place: Place | None) -> Problem:
    """Return the problem of joining rows by prompts if they don't come from the same prompts."""
    return Problem(
        "concat-groups",
        'concat with groups="prompts" needs rows that were made from the same prompts',
        place,
        found="batches without a common batch of prompts that they were made from",
        expected="rows made from one batch of prompts, such as by generate and encode",
        remedy="make each batch from the same prompts and join all of them in one call, or remove "
        'groups="prompts"',
    )


def dropped(
    what: str,
    name: str,
    kind: Kind | None,
    where: Place | None,
    lacking: str,
    optional: bool,
    place: Place | None,
) -> Problem:
    """Return the problem of reading a column that `concat` dropped.

    ``where``: the line of the `concat`. ``lacking``: which batches don't have the column. ``optional``:
    whether the call runs without it.
    """
    of_text = kind is not None and kind.level is Level.TEXT
    value = FILLS.get(name) or ('""' if of_text else ZEROS.get((kind.family if kind else None) or ""))
    fills = value if kind is None or kind.level is not Level.PROMPT else None
    return Problem(
        "concat-dropped",
        f"{what} runs without column '{name}', because concat dropped it"
        if optional
        else f"{what} needs column '{name}', but concat dropped it",
        place,
        where,
        found=f"{lacking} without '{name}'",
        expected=f"column '{name}' in each batch that concat joins",
        remedy=f"give '{name}' to each batch before concat"
        + (f'; or fill it: concat(…, fill={{"{name}": {fills}}})' if fills else ""),
        severity="warning" if optional else "error",
    )


ZEROS = {"float": "0.0", "int": "0", "uint": "0", "bool": "False"}  # family → a value to fill with
FILLS = {"temperature": "1.0", "policy_version": "-1", "scores": 'float("nan")'}  # column → a better value


def lacking_rows(name: str, kind: Kind | None, place: Place | None) -> Problem:
    """Return the problem of a merge that leaves rows without a value in a column that can't hold NaN."""
    return Problem(
        "rows-lacking",
        f"column '{name}' has no value for rows that were not chosen, or for tokens without a follow-up "
        "prompt",
        place,
        found=f"{name}: {kind}",
        expected="a float column, so that missing values can be NaN",
        remedy=f'give it as {{"{name}": row(torch.float32)}}',
    )


def state_as_column(what: str, name: str, place: Place | None) -> Problem:
    """Return the problem of reading a state scalar, ``iteration`` or ``progress`` as a column of a batch."""
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
    """Return the problem of a stage that sets a state to something other than a single number."""
    return Problem(
        "state-rows",
        f"{what} gives the state '{name}', but not as one number",
        place,
        definition,
        found=f"{name}: {kind}",
        expected=f"{name}: {state}",
        remedy="give one number, with dispatch=RANK0",
    )
