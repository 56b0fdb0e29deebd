"""Opens a file, folder or reasoning-gym task as a data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rlflow.author.columns import CONVERSATION, FIELD, Kind, text
from rlflow.author.messages import is_plain, packed
from rlflow.data import gym, hub, records
from rlflow.data.dataset import Dataset
from rlflow.data.encode import ByteEncoder, Encoder, TokenizerEncoder, Wording
from rlflow.data.faults import Fault, Room, refused
from rlflow.data.fields import FIELDS, Mapped, Record, mapped
from rlflow.data.hub_names import HubName, hub_data
from rlflow.data.json_fields import NOTHING, Wanted, choose_fields
from rlflow.data.paths import is_task
from rlflow.data.records import Raw, Splits
from rlflow.data.stored import picked, stored
from rlflow.errors import PlanError, Problem, listed, nearest

STEP = 1024  # number of records that are encoded at once
TEST = "test"  # the split that is held out
TRIED = 1000  # the settings must suit at least one record of the first TRIED


def unchanged(encoder: Encoder) -> Encoder:
    """Return the encoder unchanged. The default for ``telling`` in ``open_data``."""
    return encoder


def open_data(
    spec: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    fields: Mapping[str, str | None] | None = None,
    columns: Mapping[str, Kind] | None = None,
    wanted: Wanted = NOTHING,
    chat: bool | None = None,
    system: str | None = None,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_prompt: int | None = None,
    max_records: int | None = None,
    stream: bool = False,
    split: str | None = None,
    task: Mapping[str, Any] | None = None,
    seed: int = 0,
    bad: Literal["stop", "skip"] = "stop",
    telling: Callable[[Encoder], Encoder] = unchanged,
    completions: bool = False,
    evaluates: bool = False,
) -> Dataset:
    """Open a file, folder or reasoning-gym task as a data set.

    ``spec``: a .jsonl, .json, .parquet, .csv or .tsv file, a pattern that matches several, a Hugging Face
    dataset folder, a folder of such files, the name of a reasoning-gym task, or a data set on the Hub. Raises
    PlanError if it can't be read or doesn't fit the settings.

    - ``tokenizer``: a model folder; without one, prompts are encoded as bytes.
    - ``fields``: the file's field for each of rlflow's names, or None if it has no such field.
    - ``columns``: columns declared in addition to the standard ones.
    - ``wanted``: fields that rewards read, carried as JSON.
    - ``chat``, ``system``, ``template``, ``template_kwargs``: see ``Wording``. By default, prompts are
      chats if the tokenizer has a chat template, and plain text otherwise.
    - ``max_prompt``: the longest prompt in tokens; records with a longer one are dropped and counted.
    - ``max_records``: read only this many records of each split.
    - ``stream``: download data on the Hub while reading it, without a copy on disk.
    - ``split``: the split to read if there are several; by default "train", with the records of "test" held
      out.
    - ``task``, ``seed``: the parameters of a reasoning-gym task, and the seed used to draw its questions.
    - ``bad``: "stop" raises an error for lines without a valid record; "skip" skips them and lists them in
      ``Dataset.faults``.
    - ``completions``: True to take the assistant's last message of a conversation as the completion, if the
      records have no field for it.
    - ``evaluates``: True if the data is for evaluation: the default split is "test", and nothing is held out.
    - ``telling``: takes the encoder and returns one that adds more to prompts, such as a description of tools.
    """
    variables = template_kwargs or {}
    encoder = telling(TokenizerEncoder(tokenizer, variables) if tokenizer is not None else ByteEncoder())
    wording = Wording(encoder.chats if chat is None else chat, system, template, variables)
    if isinstance(encoder, TokenizerEncoder):
        encoder.check_variables()
    reading = Reading(
        fields or {},
        columns or {},
        wanted,
        split,
        task or {},
        seed,
        bad,
        completions,
        evaluates,
        max_records,
        stream,
    )
    data = read_data(os.path.expanduser(os.fspath(spec)), reading)
    if wanted.conversation:
        data["records"] = _with_conversations(data["records"], wording)
        data["test"] = _with_conversations(data.get("test", ()), wording)
        data["declared"] = {**data["declared"], CONVERSATION: text}
    if tokenizer is not None and not encoder.chats and not wording.chat:
        data["records"], data["alone"] = _texts(data["records"])
        data["test"], _ = _texts(data.get("test", ()))
    dataset = Dataset(**data, encoder=encoder, wording=wording, model_prompt=wanted.model_prompt)
    _check_wording(dataset)
    return dataset if max_prompt is None else _short_enough(dataset, max_prompt)


@dataclass(frozen=True)
class Reading:
    """How to read the records of a source. The fields are the arguments of ``open_data`` with these names."""

    fields: Mapping[str, str | None]
    columns: Mapping[str, Kind]
    wanted: Wanted
    split: str | None
    task: Mapping[str, Any]
    seed: int
    bad: Literal["stop", "skip"]
    completions: bool
    evaluates: bool
    max_records: int | None = None
    stream: bool = False
    limit: int | None = None  # read only this many lines of each split, and draw one question of a task

    @property
    def usual_split(self) -> str:
        """The split to read if none is named."""
        return "test" if self.evaluates else "train"


def read_data(name: str, reading: Reading) -> dict[str, Any]:
    """Return the records of a file, folder or task, and what was found in them, as arguments of ``Dataset``.

    Raises PlanError.
    """
    if is_task(name):
        names = ("fields", "split", "max_records", "stream")
        unread = {setting: getattr(reading, setting) for setting in names}
        _unused(unread, f"{name} is a reasoning-gym task")
        return _drawn(name.removeprefix(gym.PREFIX), reading)
    if reading.task:
        raise _no_setting(next(iter(reading.task)), name)
    return _read(hub_data(name) or Path(name), reading)


def _with_conversations(questions: Sequence[Record], wording: Wording) -> Sequence[Record]:
    """Add the column CONVERSATION to records: the prompt as it is in the data.

    If the user gives a system message, all prompts are messages.
    """
    chat = replace(wording, chat=True)
    prompts = (record.prompt if wording.system is None else chat.of(record) for record in questions)
    texts = (prompt if isinstance(prompt, str) else packed(prompt) for prompt in prompts)
    return stored(
        replace(record, more={**record.more, CONVERSATION: value})
        for record, value in zip(questions, texts, strict=True)
    )


def _texts(questions: Sequence[Record]) -> tuple[Sequence[Record], int]:
    """Convert prompts that are a single plain user message to plain text.

    Returns (records, how many were changed). Used if the tokenizer has no chat template.
    """
    alone = sum(map(_is_alone, questions))
    if not alone:
        return questions, 0
    return stored(
        replace(record, prompt=record.question) if _is_alone(record) else record for record in questions
    ), alone


def _is_alone(record: Record) -> bool:
    """True if the prompt is a single plain message from the user."""
    return not isinstance(record.prompt, str) and [
        (message["role"], is_plain(message)) for message in record.prompt
    ] == [("user", True)]


def _unused(settings: Mapping[str, object], why: str) -> None:
    for name, value in settings.items():
        if value:
            raise PlanError.of(
                "data-setting",
                f"'{name}' has no effect: {why}",
                found=f"{name} = {value}",
                expected=f"no '{name}'",
                remedy=f"leave out '{name}'",
            )


def _no_setting(setting: str, name: str) -> PlanError:
    known = [*FIELDS, "chat", "system", "template", "max_prompt", "max_records", "stream", "split"]
    return PlanError.of(
        "data-setting",
        f"'{setting}' has no effect: {name} is a file or a folder",
        found=f"--data.{setting}",
        expected=f"one of {listed(known)}, or a column that the flow declares",
        nearest=nearest(setting, known),
        remedy=f"leave out --data.{setting}, or write the name that you mean",
        setting=f"data.{setting}",
    )


def _drawn(task: str, reading: Reading) -> dict[str, Any]:
    parameters = reading.task
    for name in reading.columns:
        if name not in gym.COLUMNS:
            raise PlanError.of(
                "data-field",
                f"the reasoning-gym task '{task}' has no column '{name}'",
                found="prompt, answer, entry",
                expected=f"data with a field '{name}'",
                remedy="use such data, or a flow that does not declare the column",
            )
    if reading.limit is None:
        questions, doubles = gym.draw(task, parameters, reading.seed)
    else:
        questions, doubles = gym.draw_one(task, parameters, reading.seed), 0
    return {
        "name": task,
        "records": questions,
        "declared": gym.COLUMNS,
        "task": gym.scorer(task, parameters),
        "doubles": doubles,
    }


def _read(where: Path | HubName, reading: Reading) -> dict[str, Any]:
    commit = ""
    if isinstance(where, HubName):
        where = hub.pinned(where)
        commit = where.commit or ""
    elif reading.stream:
        _unused({"stream": True}, f"{where} is on this machine, and is always read without a copy")
    source = records.opened(where, reading.stream)
    if limits := [limit for limit in (reading.limit, reading.max_records) if limit is not None]:
        source = source.limited(min(limits))
    part = (where.split if isinstance(where, HubName) else None) or reading.split
    chosen = source.chosen(part, reading.usual_split)
    problems: list[Problem] = []
    first = next(_raw(source, chosen), None)
    mapping = _fitting(source, chosen, reading) if first is not None else None
    usable = stored(_records(source.items(chosen), mapping, problems))
    if not usable and not problems:
        raise source.empty()
    apart = not part and not reading.evaluates
    count = len(usable) + len(problems)
    test, of_test = _test_records(source, chosen, mapping, count) if mapping and apart else ([], [])
    problems += of_test
    faults = [Fault("unreadable", problem) for problem in sorted(problems, key=_line)]
    if faults and (reading.bad == "stop" or mapping is None):
        raise refused(source.name, faults, len(usable) + len(faults), Room())
    sources = {**mapping.fields, **mapping.json_fields.columns} if mapping else {}
    declared = dict.fromkeys((name for name in sources if name.startswith(FIELD)), text)
    return {
        "name": source.name,
        "commit": commit,
        "records": usable,
        "test": test,
        "splits": source.names,
        "split_read": chosen,
        "declared": {**reading.columns, **declared},
        "fields": sources,
        "faults": tuple(faults),
        "unread": _unread(first, sources) if first is not None else (),
    }


def _fitting(source: Splits, split: str, reading: Reading) -> Mapped:
    """Return the mapping of fields that fits the records of a split, with the fields that rewards read."""
    fields, wanted = reading.fields, reading.wanted
    own = {
        name: field
        for name, field in fields.items()
        if name in (*FIELDS, *reading.columns) or name not in wanted.names
    }
    mapping = _mapping(_raw(source, split), own, reading)
    if not wanted.any:
        return mapping
    # an optional field that is rare must not download a stream twice
    each = (item.fields for item in islice(_raw(source, split), TRIED if source.streamed else None))
    taken = {"prompt", *mapping.fields, *reading.columns}
    return replace(mapping, json_fields=choose_fields(each, wanted, fields, taken))


def _raw(source: Splits, split: str) -> Iterator[Raw]:
    return (item for item in source.items(split) if isinstance(item, Raw))


def _records(
    items: Iterable[Raw | Problem], mapping: Mapped | None, problems: list[Problem]
) -> Iterator[Record]:
    """Yield the records, and append the problems of those that can't be used to ``problems``."""
    for item in items:
        if isinstance(item, Problem):
            problems.append(item)
        elif mapping is not None:
            try:
                yield mapping.record(item)
            except PlanError as error:
                problems += error.problems


def _test_records(
    source: Splits, chosen: str, mapping: Mapped, first: int
) -> tuple[Sequence[Record], list[Problem]]:
    """Return (records, problems) of the split "test". Empty if it's ``chosen``, or if no record in it fits.

    ``first``: the number to give to its first record.
    """
    if TEST not in source.names or chosen == TEST:
        return [], []
    problems: list[Problem] = []
    test = stored(_records(source.items(TEST, first), mapping, problems))
    return (test, problems) if test else ([], [])


def _unread(first: Raw, fields: Mapping[str, str]) -> tuple[str, ...]:
    """Return the unused fields of the first record.

    A field counts as used if a nested field in it is.
    """
    needed = {field.partition(".")[0] if field not in first.fields else field for field in fields.values()}
    return tuple(str(name) for name in first.fields if name not in needed)


def _mapping(raw: Iterable[Raw], fields: Mapping[str, str | None], reading: Reading) -> Mapped:
    """Return the mapping of fields that fits the first record.

    If bad records are skipped, the first record that has all required fields is used instead. Raises
    PlanError if no mapping fits.
    """
    errors: list[PlanError] = []
    for item in raw:
        try:
            return mapped(item, fields, reading.columns, reading.completions)
        except PlanError as error:
            errors.append(error)
            if reading.bad == "stop" or len(errors) == TRIED:
                break
    raise errors[0]


def _line(problem: Problem) -> tuple[str, int]:
    return (problem.place.path, problem.place.line) if problem.place else ("", 0)


def _check_wording(data: Dataset) -> None:
    """Raise PlanError if none of the first TRIED records can be encoded with the data set's settings.

    This way, a run with unsuitable settings fails before it computes anything.
    """
    errors: list[PlanError] = []
    for record in data.records[:TRIED]:
        try:
            data.encoder.prompts([data.wording.of(record)])
            return
        except PlanError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _short_enough(data: Dataset, limit: int) -> Dataset:
    """Return the data set without prompts longer than ``limit`` tokens.

    Records that can't be encoded are kept for now, and reported later with the other faults.
    """
    limited = replace(data, room=Room(limit))
    long: dict[int, int] = {}
    for start in range(0, len(data), STEP):
        faults = limited.faulty(range(start, min(start + STEP, len(data))))
        long |= {i: fault.tokens for i, fault in faults.items() if fault.cause == "too_long"}
    if long and len(long) == len(data):
        raise PlanError.of(
            "data-empty",
            f"every prompt of {data.name} is longer than max_prompt",
            found=f"max_prompt = {limit}",
            expected=f"at least {min(long.values())}, the length of its shortest prompt",
            remedy=f"--data.max_prompt {min(long.values())} or more",
        )
    test = replace(limited, records=data.test, test=())
    too_long = {i for i, fault in test.faulty(range(len(test))).items() if fault.cause == "too_long"}
    return replace(
        data,
        records=picked(data.records, (i for i in range(len(data)) if i not in long)),
        test=picked(data.test, (i for i in range(len(test)) if i not in too_long)),
        dropped=len(long) + len(too_long),
    )
