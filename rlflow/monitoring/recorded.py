"""Read everything recorded in a run's folder: settings by flag, curves and costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.author.figures import HELD_OUT, Figure, Of
from rlflow.checkpoints.logs import Growing, objects, read_object
from rlflow.monitoring import keys
from rlflow.monitoring.history import History, RunSummary, is_number, summarised
from rlflow.monitoring.keys import Figures

Curve = Sequence[tuple[int, float]]  # (number of finished iterations, value), in the order of iterations

EVALUATION = "evaluation/"  # prefix of the names of an evaluation's numbers
EVALUATED = (Of.EVALUATION, Of.SET)  # subjects of an evaluation's figures
VERSIONS = ("rlflow", "torch", "threads")  # entries of settings.json that are not flags
NO_SETTINGS = {"name", "out", "track"}  # options without effect on the numbers of a run


@dataclass(frozen=True)
class Costs:
    """A run's totals. A total is None if the run's folder doesn't record it."""

    seconds: float | None = None  # seconds of the iterations, without evaluations and loading
    sampled: int | None = None  # number of rows with sampled tokens
    tokens: int | None = None  # number of sampled tokens, without prompts
    trained: int | None = None  # number of rows that updates used


@dataclass(frozen=True)
class Recorded:
    """Everything recorded in a run's folder."""

    folder: Path
    summary: RunSummary
    settings: Mapping[str, Any]  # flag name → value, such as hp.samples, prompts, actor.lr
    history: History
    costs: Costs
    table: Mapping[str, Figure] = field(default_factory=dict)  # name of a metric → its figure

    @property
    def name(self) -> str:
        """The run's name, which is that of its folder."""
        return self.folder.name

    def curve(self, metric: str) -> Curve:
        """Return a metric as (finished iterations, value) pairs. Empty if the run doesn't have it."""
        if metric in self.table and self.table[metric].of in EVALUATED:
            return sorted(
                {
                    number: values[metric] for number, values in self.history.evaluations if metric in values
                }.items()
            )
        return sorted(
            {
                number + 1: values[metric] for number, values in self.history.iterations if metric in values
            }.items()
        )

    @property
    def metrics(self) -> list[str]:
        """The names of all recorded metrics, sorted."""
        return sorted(self.history.names)

    def keys(self, chosen: Callable[[Figure], bool]) -> list[str]:
        """Return the names of the metrics whose figure meets the condition ``chosen``, sorted."""
        return [name for name in self.metrics if chosen(self.table[name])]

    @property
    def shares(self) -> list[str]:
        """The names of the accuracies of sampled answers.

        The one on held-out prompts in the data comes first, then one for each set given with --eval.
        """
        return [*self.keys(lambda figure: figure == HELD_OUT), *self.keys(is_share_of_set)]


def recorded(folder: Path) -> Recorded:
    """Read the records in a run's folder.

    Never raises: if a file can't be read, its values keep their defaults.
    """
    history = History(keys.read(folder))
    for line in Growing(folder / "metrics.jsonl").lines():
        history.add(line)
    seconds = [values["seconds"] for values in dict(history.iterations).values() if "seconds" in values]
    return Recorded(
        folder.absolute(),
        summarised(folder),
        flags_of(folder),
        history,
        costs(folder, sum(seconds) if seconds else None),
        keys.completed(history.table, history.names),
    )


def flags_of(folder: Path) -> dict[str, Any]:
    """Return a run's settings by flag, with its flow, the digest of its graph and package versions."""
    content = read_object(folder / "settings.json")
    hp, options, values = (_object(content.get(name)) for name in ("hp", "options", "values"))
    flags = {name: content[name] for name in ("flow", "graph", *VERSIONS) if name in content}
    flags |= {f"hp.{name}": value for name, value in hp.items()}
    return flags | {name: value for name, value in (values | options).items() if name not in NO_SETTINGS}


def sampled_share(evaluation: Figures) -> float | None:
    """Return the accuracy of sampled answers on the held-out prompts in the data.

    If there are none, this is the accuracy on the first set given with --eval. None if there is neither.
    """
    return next(
        (
            evaluation[figure]
            for figure in (HELD_OUT, *filter(is_share_of_set, evaluation))
            if figure in evaluation
        ),
        None,
    )


def is_share_of_set(figure: Figure) -> bool:
    """Whether a metric is the accuracy of the first role's sampled answers on a set given with --eval."""
    return figure.of is Of.SET and figure.name == "sampled" and not figure.role


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def costs(folder: Path, seconds: float | None) -> Costs:
    """Return a run's totals, from the row accounting in fates.jsonl.

    ``seconds``: the total seconds of all iterations. A row that is carried over counts in the iteration that
    finishes it.
    """
    lines = objects(Growing(folder / "fates.jsonl").lines())
    by_iteration = {line["iteration"]: line for line in lines if isinstance(line.get("iteration"), int)}
    if not by_iteration:
        return Costs(seconds)
    sampled = [count for line in by_iteration.values() for count in _object(line.get("sampled")).values()]
    outcomes = [
        part
        for line in by_iteration.values()
        for part in (line["fates"] if isinstance(line.get("fates"), list) else ())
    ]
    trained = [part for part in outcomes if isinstance(part, dict) and part.get("fate") == "trained"]
    with_tokens = [count for count in sampled if isinstance(count, dict) and count.get("tokens")]
    return Costs(seconds, _total(with_tokens, "rows"), _total(with_tokens, "tokens"), _total(trained, "rows"))


def _total(counts: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(count[name] for count in counts if isinstance(count.get(name), int))


def differing(flags: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, with the value in each run as text.

    The text is "-" if a run doesn't have the setting.
    """
    names = dict.fromkeys(name for settings in flags for name in settings)
    texts = {
        name: [as_text(settings[name]) if name in settings else "-" for settings in flags] for name in names
    }
    return {name: values for name, values in texts.items() if len(set(values)) > 1}


def as_text(value: Any) -> str:
    """Return a setting as text that its flag accepts.

    Equal numbers give the same text, even if one was recorded as a number and the other as a string.
    """
    if isinstance(value, str):
        try:
            number = json.loads(value)
        except ValueError:
            return value
        return as_text(number) if is_number(number) else value
    if is_number(value):
        return f"{value:g}" if abs(value) < 1e6 and float(f"{value:g}") == value else json.dumps(value)
    if isinstance(value, list):
        return ",".join(map(as_text, value))
    return "none" if value is None else json.dumps(value) if isinstance(value, bool | dict) else str(value)
