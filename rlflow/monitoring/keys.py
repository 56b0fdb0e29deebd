"""The names of metrics in metrics.jsonl.

A run chooses the names as it writes the file, and stores what they mean in figures.json next to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlflow.author.figures import SECONDS, SPEED, Figure, Of
from rlflow.checkpoints import durable

FILE = "figures.json"  # maps names in metrics.jsonl to their figures
Figures = Mapping[Figure, float]


class FigureNames:
    """Gives each figure a unique name in metrics.jsonl, the same in every line.

    ``table``: names that an earlier process of the same run chose.
    """

    def __init__(self, table: Mapping[str, Figure] | None = None) -> None:
        self.table = dict(table or {})
        self._names = {figure: key for key, figure in self.table.items()}

    def of(self, figure: Figure) -> str:
        """Return the name of a figure.

        If the plain name is taken by another figure, this figure's kind is added in brackets.
        """
        if figure not in self._names:
            key = (
                figure.key if figure.key not in (*self.table, "iteration") else f"{figure.key} ({figure.of})"
            )
            self.table[key], self._names[figure] = figure, key
        return self._names[figure]

    def packed(self) -> bytes:
        """Return the names and their figures as the contents of figures.json."""
        lines = (
            f"{json.dumps(key)}: {json.dumps({name: text for name, text in figure._asdict().items() if text})}"
            for key, figure in self.table.items()
        )
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read(folder: Path) -> dict[str, Figure]:
    """Return the figure for each name in a run's figures.json, or {} if the file can't be read."""
    try:
        content = json.loads(durable.read(folder / FILE))
        return {
            key: Figure(Of(entry["of"]), *(str(entry.get(name, "")) for name in Figure._fields[1:]))
            for key, entry in content.items()
        }
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return {}


def completed(table: Mapping[str, Figure], keys: Iterable[str]) -> dict[str, Figure]:
    """Return the table with an entry for each of ``keys``.

    Figures that are missing are guessed from their names, because earlier versions wrote no table.
    """
    unknown = [key for key in dict.fromkeys(keys) if key not in table]
    return dict(table) | (_guessed(unknown) if unknown else {})


def by_figure(values: Mapping[str, float], table: Mapping[str, Figure]) -> dict[Figure, float]:
    """Return the numbers in a line of metrics.jsonl, by figure. ``table``: the result of ``completed``."""
    return {table[key]: value for key, value in values.items()}


def is_evaluation(table: Mapping[str, Figure], keys: Iterable[str]) -> bool:
    """Whether a line of metrics.jsonl that has these keys is from an evaluation."""
    own = [key for key in keys if key != "iteration"]
    figures = [table[key] for key in own if key in table] + list(
        _guessed([key for key in own if key not in table]).values()
    )
    return any(figure.of in (Of.EVALUATION, Of.SET) for figure in figures)


# -- folders of an earlier version
# -------------------------------------------------------------------------------------------------

NODE = re.compile(r"(?P<role>[^/]+)\.update(?:#\d+)?/(?P<name>.+)")
SHARE = re.compile(r"sampled|greedy|score|(?:mean|pass|maj)@\d+")
SCORES = (
    "missing_rate",
    "flat_groups",
    "even_groups",
    "even_lowest",
    "even_highest",
    "uneven_mean",
    "lowest",
    "highest",
)
ROWS = re.compile(
    r"(?:(?P<role>[^/]+)/)?(?P<name>(?:policy|critic|response|funnel|env)/.+|reward/(?P<score>"
    + "|".join(SCORES)
    + r"))"
)


def _guessed(keys: list[str]) -> dict[str, Figure]:
    parts = {key: tuple(key.split("/")) for key in keys}
    sets = {
        each[1]
        for each in parts.values()
        if len(each) == 3 and each[0] == "evaluation" and each[2] == "prompts"
    }
    rewards = {
        key.removesuffix("/mean")
        for key in keys
        if key.endswith("/mean") and f"{key.removesuffix('/mean')}/missing" in keys
    }
    return {key: _guess(key, parts[key], sets, rewards) for key in keys}


def _guess(key: str, parts: tuple[str, ...], sets: set[str], rewards: set[str]) -> Figure:
    head, _, rest = key.partition("/")
    if head == "evaluation":
        return _evaluated(parts[1:], sets)
    if (update := NODE.fullmatch(key)) is not None:
        return Figure(Of.UPDATE, update["name"], head, update["role"])
    if (rows := ROWS.fullmatch(key)) is not None and key != SPEED.key:
        of, name = (Of.SCORES, rows["score"]) if rows["score"] else (Of.ROWS, rows["name"])
        return Figure(of, name, role=rows["role"] or "")
    if head in rewards or (head == "reward" and rest == "mean"):
        part = rest.removesuffix("_mean")
        return (
            Figure(Of.REWARD, "mean", head, head, part)
            if part != rest
            else Figure(Of.REWARD, rest, head, head)
        )
    if head == "scores":
        return Figure(Of.SOURCE, rest)
    if head == "canary":
        return Figure(Of.WEIGHT_CHECK, rest.rpartition("_")[2], role=rest.rpartition("_")[0])
    if head in ("fates", "data"):
        return (
            Figure(Of.ROW_OUTCOME, rest)
            if head == "fates"
            else Figure(Of.LEFT_OUT, rest.removeprefix("left_out_"))
        )
    if rest and key != SPEED.key:
        return Figure(Of.NODE if "." in head else Of.STAGE, rest, head)
    return Figure(Of.RUN if key in (SECONDS.key, SPEED.key) else Of.STATE, key)


def _evaluated(parts: tuple[str, ...], sets: set[str]) -> Figure:
    if parts[0] in sets:
        return Figure(Of.SET, parts[-1], role="/".join(parts[1:-1]), part=parts[0])
    if len(parts) > 1 and SHARE.fullmatch(parts[0]):
        return Figure(Of.EVALUATION, parts[0], part="/".join(parts[1:]))
    return Figure(Of.EVALUATION, parts[-1], role="/".join(parts[:-1]))
