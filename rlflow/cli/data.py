"""`rlflow data`: print a data set the way a model reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.config.flags import parse_flags
from rlflow.config.roles.opened_data import data_settings, own_settings
from rlflow.config.roles.prompt_room import positions_of
from rlflow.data import hub
from rlflow.data.data_preview import LengthSummary, Preview, PreviewRow, Text, preview
from rlflow.data.data_spec import SourceSpec, parse_sources
from rlflow.data.dataset import Dataset
from rlflow.data.faults import Room
from rlflow.data.hub_names import hub_model
from rlflow.data.source import open_data
from rlflow.errors import PlanError, nearest
from rlflow.monitoring.tables import output, plain

IDS = 32  # how many token ids are shown at each end of a string


def show_data(file: str, arguments: Sequence[str]) -> int:
    """Print how records of a file, folder or task become prompts, and return the exit code.

    ``arguments``: the command's flags, which can add more sources with --data. Raises PlanError.
    """
    flags = parse_flags(arguments)
    sources = parse_sources((file, *flags.pop("data", ())))
    as_json, model, rows = (
        bool(flags.pop("json", False)),
        flags.pop("model", None),
        _count(flags.pop("rows", "3")),
    )
    settings = {
        name.removeprefix("data."): flags.pop(name) for name in list(flags) if name.startswith("data.")
    }
    if flags:
        raise _unknown(next(iter(flags)))
    folder = str(tokenizer_folder(model)) if model else None
    names = [source.name for source in sources]
    opened = {
        name: _opened(source, folder, own_settings(settings, name, names))
        for name, source in zip(names, sources, strict=True)
    }
    previews = {name: preview(data, rows) for name, data in opened.items()}
    total = sum(shares := [source.weight or len(opened[source.name]) for source in sources])
    if as_json:
        by_source = {
            name: {"share": float(share / total), **each.as_json()}
            for share, (name, each) in zip(shares, previews.items(), strict=True)
        }
        print(
            json.dumps(by_source if len(by_source) > 1 else previews[names[0]].as_json(), ensure_ascii=False)
        )
        return 0
    for share, (name, each) in zip(shares, previews.items(), strict=True):
        head = [f"source {name}: {float(share / total):.1%} of the prompts"] if len(sources) > 1 else []
        output(plain(line) for line in [*head, *lines(each)])
    return 0


def tokenizer_folder(model: str) -> Path:
    """Return the folder given by ``--model``. For a name on the Hub, fetches the config and tokenizer."""
    name = hub_model(os.path.expanduser(model))
    return hub.described_model(hub.pinned(name)) if name else Path(os.path.expanduser(model))


def _opened(source: SourceSpec, folder: str | None, settings: Mapping[str, Any]) -> Dataset:
    """Open a source the way a run of the model in ``folder`` would."""
    data = open_data(
        source.path, tokenizer=folder, bad="skip", completions=True, **data_settings(settings, ())
    )
    positions = positions_of(Path(folder)) if folder else None
    return (
        data.within(Room(positions, positions, f" ({positions} positions of the model)"))
        if positions
        else data
    )


def lines(preview: Preview) -> Iterator[str]:
    """Yield the lines that `rlflow data` prints about a source."""
    yield f"{preview.name}: {preview.records} usable records, {preview.shape}"
    yield from (f"  {name:<12} read from the field '{field}'" for name, field in preview.fields.items())
    if preview.splits:
        yield f"  {preview.splits}"
    if preview.unread:
        yield f"  unused fields: {', '.join(preview.unread)} (--data.NAME FIELD maps a field)"
    yield (
        f"  prompts are formatted {preview.wording}"
        if preview.wording.startswith("as ")
        else f"  {preview.wording}"
    )
    lengths = {"prompts": preview.prompts, "responses": preview.responses}
    yield from (f"  {what}: {_lengths(of)}" for what, of in lengths.items() if of)
    for cause in preview.left_out:
        places = (
            f" ({', '.join(cause.places)}{', …' if cause.count > len(cause.places) else ''})"
            if cause.places
            else ""
        )
        yield f"  skipped: {cause.count} {cause.cause}{places}"
    if not preview.left_out:
        yield "  no record is skipped"
    if preview.equal_pairs:
        yield f"  {preview.equal_pairs}"
    for warning in preview.warnings:
        yield from (f"  {line}" for line in warning.splitlines())
    for number, row in enumerate(preview.rows, 1):
        yield ""
        yield from _row(number, row)


def _lengths(of: LengthSummary) -> str:
    return f"{of.shortest} to {of.longest} tokens, median {of.median}, 95th percentile {of.longest_of_95}"


def _row(number: int, row: PreviewRow) -> Iterator[str]:
    yield f"row {number}{f', {row.place}' if row.place else ''}"
    yield from _text("prompt", row.prompt)
    if row.response is not None:
        yield from _text("response", row.response)
    for name, value in row.columns.items():
        first, *rest = str(value).splitlines() or [""]
        yield f"  {name}: {first}"
        yield from (f"    {line}" for line in rest)


def _text(what: str, text: Text) -> Iterator[str]:
    yield f"  {what}, {len(text.ids)} tokens:"
    yield from (f"    {line}" for line in text.text.splitlines() or [""])
    yield f"    ids, special tokens in brackets: {_ids(text)}"


def _ids(text: Text) -> str:
    shown = [
        f"[{number} {text.special[place]}]" if place in text.special else str(number)
        for place, number in enumerate(text.ids)
    ]
    return " ".join(
        shown if len(shown) <= 2 * IDS else [*shown[:IDS], f"… {len(shown) - 2 * IDS} more …", *shown[-IDS:]]
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise PlanError.of(
            "flag",
            "--rows is not a number of records",
            found=text,
            expected="0 or more",
            remedy="--rows 3",
        )
    return int(text)


def _unknown(name: str) -> PlanError:
    written = f"--{name.replace('_', '-')}"
    return PlanError.of(
        "unknown-flag",
        f"`rlflow data` has no flag {written}",
        found=written,
        expected="--model FOLDER, --rows COUNT, --json, --data FILE for another source, or --data.NAME "
        "VALUE as in `rlflow run`",
        nearest=nearest(
            written, ["--model", "--rows", "--json", "--data.prompt", "--data.answer", "--data.chat"]
        ),
        remedy="leave it out",
    )
