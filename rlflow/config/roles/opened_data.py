"""Open the data given by --data and --data.NAME, and split it into training and held-out records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge

from rlflow.author.columns import Level
from rlflow.author.flow import Flow
from rlflow.author.settings import parse
from rlflow.config.flags import RunConfig, evaluation_names
from rlflow.config.template_kwargs import TEMPLATE, number, template_kwargs
from rlflow.data.data_spec import parse_sources
from rlflow.data.dataset import Dataset
from rlflow.data.encode import ByteEncoder, Encoder
from rlflow.data.fields import FIELDS, Record
from rlflow.data.json_fields import NOTHING, Wanted
from rlflow.data.mixed import fifths, mixed
from rlflow.data.source import open_data, unchanged
from rlflow.errors import PlanError, listed, nearest

TEXT_OPTIONS = ("system", "template", "split")
SWITCHES = ("chat", "stream")
COUNTS: dict[str, Any] = {
    "max_prompt": Annotated[int, Ge(1)],
    "max_records": Annotated[int, Ge(1)],
    "seed": Annotated[int, Ge(0)],
}
SHARED = ("system", "template", "chat", TEMPLATE)  # settings that are the same for all sources


def open_dataset(
    flow: Flow,
    config: RunConfig,
    wanted: Callable[[str], Wanted] = lambda source: NOTHING,
    telling: Callable[[Encoder], Encoder] = unchanged,
    opening: Callable[..., Dataset] = open_data,
) -> Dataset:
    """Open the run's data as a single data set, even if there are several sources.

    If no data are named, the null backend gets synthetic records. ``wanted``: a function from a source's name
    to the fields that its rewards may read. ``telling``: as in ``open_data``. ``opening``: opens a
    source, as ``open_data`` does. Raises PlanError if a source cannot be read, or if no data are named and another backend needs them.
    """
    if not config.options.data:
        if config.options.backend == "null":
            return made_up(flow)
        raise PlanError.of(
            "no-data",
            "the run has no data",
            found="no --data",
            expected="a file, a folder or a reasoning-gym task",
            remedy="--data FILE",
        )
    columns = {name: kind for name, kind in flow.data.items() if name not in FIELDS}
    sources = parse_sources(config.options.data)
    names = [*(source.name for source in sources), *evaluation_names(config.options.eval)]
    parts: dict[str, Dataset] = {}
    for source in sources:
        asked = wanted(source.name)
        settings = data_settings(own_settings(config.data, source.name, names), flow.data, asked)
        parts[source.name] = opening(
            source.path,
            tokenizer=config.tokenizer_folder,
            columns=columns,
            wanted=asked,
            bad=config.options.bad_records,
            telling=telling,
            completions="completion" in flow.data,
            **settings,
        )
        holds_responses(flow, parts[source.name], source.path)
    if len(parts) == 1:
        return parts[sources[0].name]
    # either all sources have a weight or none has
    return mixed(parts, {source.name: source.weight for source in sources if source.weight is not None})


def own_settings(values: Mapping[str, Any], source: str, sources: Sequence[str]) -> dict[str, Any]:
    """Return the settings for one data source. ``--data.SOURCE.NAME`` overrides ``--data.NAME``.

    ``values``: all data settings by name. Raises PlanError for an unknown source, or for
    ``--data.SOURCE.NAME`` if NAME has to be the same for all sources.
    """
    common: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value in values.items():
        head = next(
            (each for each in sorted(sources, key=len, reverse=True) if name.startswith(f"{each}.")), None
        )
        if head is None and "." in name and not name.startswith(f"{TEMPLATE}."):
            raise PlanError.of(
                "data-setting",
                f"'--data.{name}' names no source of data",
                setting=f"data.{name}",
                found=name.rpartition(".")[0],
                expected=f"one of {listed(sources)}",
                nearest=nearest(name.rpartition(".")[0], sources),
                remedy="leave it out, or name the source: "
                f"--data SOURCE=FILE --data.SOURCE.{name.rpartition('.')[2]} …",
            )
        if head is None:
            common[name] = value
        elif (rest := name.removeprefix(f"{head}.")).partition(".")[0] in SHARED:
            raise PlanError.of(
                "data-setting",
                f"'{rest}' is the same for all sources",
                found=f"--data.{name}",
                expected=f"--data.{rest}",
                remedy=f"--data.{rest} {value}, which sets it for all sources",
                setting=f"data.{name}",
            )
        elif head == source:
            own[rest] = value
    return {**common, **own}


def data_settings(
    values: Mapping[str, Any], declared: Iterable[str], wanted: Wanted = NOTHING
) -> dict[str, Any]:
    """Convert the values of ``--data.NAME`` to keyword arguments for ``open_data``.

    ``declared``: columns that the flow reads from the data, besides the standard ones. ``wanted``: fields
    that rewards may read. Any other name that isn't a data setting is a parameter of a reasoning-gym task.
    """
    fields: dict[str, str | None] = {}
    options: dict[str, Any] = {}
    task: dict[str, Any] = {}
    columns = tuple(declared)
    for name, value in values.items():
        if name in FIELDS or name in columns or name in wanted.names:
            fields[name] = str(value)
        elif name in TEXT_OPTIONS:
            options[name] = str(value)
        elif name in SWITCHES:
            options[name] = true_or_false(name, value)
        elif name in COUNTS:
            options[name] = counted(name, value)
        elif name.partition(".")[0] == TEMPLATE:
            options[TEMPLATE] = template_kwargs(values)
        else:
            task[name] = number(value)
    return {**options, "fields": fields or None, "task": task or None}


def holds_responses(flow: Flow, data: Dataset, source: str) -> None:
    """Raise PlanError if the flow learns from responses in the data but the records have none.

    The flow decides whether records need the field completion, or chosen and rejected. ``source``: the name
    of the data in the message.
    """
    wanted = {"completion": ("completion",), "chosen": ("chosen", "rejected")}
    for name, needed in wanted.items():
        if name in flow.data and name not in data.columns:
            raise PlanError.of(
                "data-field",
                f"flow '{flow.name}' needs records with {' and '.join(needed)}, which {source} does not have",
                found=f"fields read: {listed(data.fields.values())}",
                expected=f"the fields prompt, {', '.join(needed)}",
                remedy=f"use other data, or map them: {' '.join(f'--data.{field} FIELD' for field in needed)}",
            )


def counted(name: str, value: Any) -> int:
    """Convert a data setting to an integer. Raises PlanError if it is invalid or out of range."""
    try:
        return int(parse(COUNTS[name], value))
    except ValueError as error:
        raise PlanError.of(
            "setting-range",
            f"the setting 'data.{name}' does not fit",
            found=repr(value),
            expected=str(error),
            remedy=f"change --data.{name}",
            setting=f"data.{name}",
        ) from None


def true_or_false(name: str, value: Any) -> bool:
    """Convert the value of ``--data.NAME`` to a bool. Raises PlanError unless it is true or false."""
    if str(value).lower() not in ("true", "false"):
        raise PlanError.of(
            "flag",
            f"--data.{name} must be true or false",
            found=str(value),
            expected="true or false",
            remedy=f"--data.{name} true",
            setting=f"data.{name}",
        )
    return str(value).lower() == "true"


def made_up(flow: Flow) -> Dataset:
    """Return synthetic records for the null backend, with the columns that the flow declares."""
    responses = ("good", "bad") if "chosen" in flow.data else ("good",) if "completion" in flow.data else ()
    filler = {
        name: "x" if kind.level is Level.TEXT else 0 for name, kind in flow.data.items() if name not in FIELDS
    }
    records = [Record(f"question {i}", str(i), responses, filler, number=i) for i in range(4096)]
    return Dataset(
        "made-up records",
        records,
        ByteEncoder(),
        declared={n: k for n, k in flow.data.items() if n not in FIELDS},
    )


def split_records(data: Dataset, held_out: int) -> tuple[Dataset, Dataset]:
    """Split data into training and held-out data.

    Held-out questions come from the split "test" if there is one. Otherwise, they are at most a fifth of all
    questions.
    """
    if data.parts:
        return data.split(fifths(data, held_out) if held_out else 0)
    if data.test:
        return data.split(held_out)
    return data.split(min(held_out, len({hash(record.question) for record in data.records}) // 5))
