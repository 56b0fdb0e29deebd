"""What `rlflow runs` and `rlflow show` print, including an episode turn by turn."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from rlflow.author.figures import SCORE
from rlflow.checkpoints import durable
from rlflow.checkpoints.logs import objects, read_object, tail
from rlflow.errors import listed, printable
from rlflow.monitoring import served
from rlflow.monitoring.chart import ALONE, chart
from rlflow.monitoring.choosing import ListedRun
from rlflow.monitoring.explained import bound_lines, pointer
from rlflow.monitoring.frame import OWN, Frame, figures, format_duration
from rlflow.monitoring.funnel import funnel_lines
from rlflow.monitoring.history import RunSummary, stage_seconds
from rlflow.monitoring.keys import Figures, by_figure
from rlflow.monitoring.metric_names import accuracies, change, is_mean, is_own, means, share
from rlflow.monitoring.recorded import Recorded, as_text, differing, recorded, sampled_share
from rlflow.monitoring.recorder import NOTES

LONGEST = 400  # how many characters of a turn are shown


def last_episode(folder: Path) -> Text | None:
    """Return the last sampled episode that has more than one turn, as text.

    If none has, this is the last episode. None if no sample has an episode.
    """
    rows = [row for row in objects(tail(folder / "samples.jsonl")) if isinstance(row.get("episode"), dict)]
    several = [row for row in rows if len(turns_of(row)) > 1]
    row = next(iter((several or rows)[::-1]), None)
    return Text("\n".join(lines(row))) if row is not None else None


def turns_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the turns of a sample's episode."""
    turns = row["episode"].get("turns")
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of an episode: its prompt, each turn, and how it ended."""
    episode = row["episode"]
    yield f"an episode of iteration {row.get('iteration')}: {shown(row.get('prompt'))}"
    if "reset" in episode:
        yield f"  environment: {shown(episode['reset'])}"
    for turn in turns_of(row):
        reward = f"  (reward {turn['reward']:g})" if isinstance(turn.get("reward"), int | float) else ""
        yield f"  model: {shown(turn.get('said'))}{reward}"
        if "says" in turn:
            yield f"  environment: {shown(turn['says'])}"
    score = row.get("scores")
    yield (
        f"  end: {row.get('finish')}"
        + (f", score {score:g}" if isinstance(score, int | float) else "")
        + (f"; {shown(episode['failed'])}" if "failed" in episode else "")
    )


def shown(words: Any) -> str:
    """Format a string or chat messages as one line."""
    if isinstance(words, list):
        words = " ".join(
            f"[{each.get('role')}] {each.get('content')}" for each in words if isinstance(each, dict)
        )
    text = repr(str(words))[1:-1]
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


STYLES = {"running": "cyan", "done": "green", "failed": "red", "died": "red", "interrupted": "yellow"}
BARS = "▁▂▃▄▅▆▇█"
COLUMNS = ("run", "flow", "state", "iteration", "accuracy", "reward", "age")  # columns of the list of runs
SETTINGS = 6  # how many settings get a column in that list
FIXED, EACH = 62, 13  # approximate width of the list's fixed columns, and of each setting's column
WIDE = 160  # columns of the output if it does not go to a terminal
CURVE = 60  # characters of a curve
LINES = 6  # lines of the learning curve
PARTS = 4  # how many files of a model folder are listed
FILES = {
    "settings.json": "settings of the run",
    "identity.json": "inputs it depends on",
    "graph.txt": "the graph of one iteration",
    "metrics.jsonl": "all metrics",
    "figures.json": "meanings of the metrics",
    "samples.jsonl": "samples",
    "rewards.txt": "output of rewards",
    "services": "output of services",
    "answers.jsonl": "held-out answers before and after training",
    "evaluations": "all held-out answers",
    "timeline.json": "times, for ui.perfetto.dev",
    "traffic.jsonl": "bytes between processes",
    "bounds.txt": "limits of its speed",
    "bounds.json": "the same as JSON",
    "weights.json": "plan of weight transfers",
    "final": "trained models",
    "tensorboard": "TensorBoard events",
    "wandb": "Weights & Biases",
}
TELLING = ("model", "data", "reward", "backend", "device", "dtype", "prompts", "seed")


def runs(
    chosen: Sequence[ListedRun], now: float, names: Sequence[str] = (), width: int = WIDE
) -> list[RenderableType]:
    """Return a table with a row for each run, in the given order.

    Its columns include settings that differ between the runs, and the requested ``names``. Differing settings
    that don't fit are listed below the table. ``now``: seconds since the epoch. ``width``: columns of the
    terminal.
    """
    different = {
        name: values
        for name, values in differing([run.settings for run in chosen]).items()
        if name not in ("flow", "graph")
    }
    different = {
        name: different[name]
        for name in sorted(different, key=lambda name: (name not in names, not name.startswith("hp.")))
    }
    requested = [name for name in dict.fromkeys(names) if name not in {*different, *COLUMNS, "updated"}]
    most = min(max((width - FIXED) // EACH, 1), SETTINGS)
    shown = list(different)[:most]
    table = Table(*COLUMNS, box=None, padding=(0, 2, 0, 0))
    for name in (*shown, *requested):
        table.add_column(plain(name))
    for position, run in enumerate(chosen):
        summary = run.summary
        accuracy = sampled_share(summary.evaluated)
        own = [different[name][position] for name in shown] + [
            requested_text(run, name) for name in requested
        ]
        table.add_row(
            plain(summary.folder.name),
            plain(summary.flow),
            state(summary),
            f"{summary.iteration}/{summary.iterations}",
            "" if accuracy is None else f"{accuracy:.1%}",
            plain(mean_rewards(summary.figures)),
            format_duration(max(now - summary.updated, 0.0)),
            *map(plain, own),
        )
    more = list(different)[most:]
    return [table, plain(f"other settings that differ: {listed(more)}")] if more else [table]


def mean_rewards(figures: Figures) -> str:
    """Return the mean reward as text, with the role's name if there are several. Empty if there is none."""
    found = means(figures)
    return ", ".join(f"{f'{figure.node} ' * (len(found) > 1)}{figures[figure]:.3f}" for figure in found)


def requested_text(run: ListedRun, name: str) -> str:
    """Return a setting as the user wrote it, or a metric to four digits, or "-" if the run has neither."""
    value = run.values.get(name)
    return (
        "-"
        if name not in run.values
        else f"{value:.4g}"
        if isinstance(value, float) and name not in run.settings
        else as_text(value)
    )


def as_json(runs: Sequence[ListedRun]) -> str:
    """Return the runs as one line of JSON, each with its folder, state, settings and latest metrics."""
    return json.dumps(
        [
            {
                "folder": str(run.summary.folder.absolute()),
                "flow": run.summary.flow,
                "state": run.summary.state,
                "iteration": run.summary.iteration,
                "iterations": run.summary.iterations,
                "updated": run.summary.updated,
                "error": run.summary.error,
                "settings": dict(run.settings),
                "metrics": dict(run.summary.metrics),
                "evaluation": dict(run.summary.evaluation),
            }
            for run in runs
        ]
    )


def state(summary: RunSummary) -> Text:
    """Return a run's state as colored text."""
    return Text(
        summary.state + (" (damaged)" if summary.problem else ""), style=STYLES.get(summary.state, "")
    )


def story(folder: Path) -> list[RenderableType]:
    """Return what `rlflow show` prints, from the run's settings to its files."""
    run = recorded(folder)
    summary, history = run.summary, run.history
    age = format_duration(max(time.time() - summary.updated, 0.0))
    head = Text.assemble(
        (printable(str(folder)), "bold"),
        "  ",
        plain(summary.flow),
        "  ",
        state(summary),
        f"  {summary.iteration}/{summary.iterations} iterations, last written {age} ago",
    )
    problems = [f"error: {summary.error}"] if summary.error else []
    problems += [summary.problem] if summary.problem else []
    problems += [f"metrics.jsonl: {history.damaged} lines cannot be read"] if history.damaged else []
    problems += [line] if (line := pointer(folder)) else []
    parts = [
        head,
        *(plain(line) for line in problems),
        settings(folder),
        learning(run),
        *curves(run),
        last(summary, folder),
        last_episode(folder),
    ]
    return [
        part
        for part in [*parts, bounds(folder), notes(folder), depends(folder), services(folder), files(folder)]
        if part is not None
    ]


def settings(folder: Path) -> RenderableType | None:
    """Return a run's most important settings, or None if there are none.

    These are the algorithm's settings, those in TELLING, and those of roles.
    """
    recorded = read_object(folder / "settings.json")
    lines = []
    for title, values, names in (("hp", recorded.get("hp"), None), ("run", recorded.get("options"), TELLING)):
        if isinstance(values, dict):
            present = {
                name: values[name] for name in (names or values) if values.get(name) not in (None, [], "")
            }
            lines.append(f"{title}: {_pairs(present)}")
    values = recorded.get("values")
    by_role: dict[str, dict[str, object]] = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        role, dot, setting = name.partition(".")
        if dot and role != "hp":
            by_role.setdefault(role, {})[setting] = value
    lines += [f"{role}: {_pairs(own)}" for role, own in by_role.items()]
    return plain("\n".join(lines)) if lines else None


def _pairs(values: Mapping[str, object]) -> str:
    return "  ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()
    )


def learning(run: Recorded) -> RenderableType | None:
    """Return a table that compares the first and last evaluation, or None if there are fewer than two."""
    history = run.history
    if len(history.evaluations) < 2:
        return None
    ends = (history.evaluations[0], history.evaluations[-1])
    (first, one), (end, two) = ((number, by_figure(values, run.table)) for number, values in ends)
    before, after = accuracies(one), accuracies(two)
    table = Table(
        "held-out accuracy", f"after {first}", f"after {end}", "change", box=None, padding=(0, 2, 0, 0)
    )
    for name in before:
        if name in after:
            table.add_row(
                plain(name), share(before[name]), share(after[name]), change(before[name], after[name])
            )
    if SCORE in one and SCORE in two:
        table.add_row(
            "mean score", f"{one[SCORE]:.3f}", f"{two[SCORE]:.3f}", f"{two[SCORE] - one[SCORE]:+.3f}"
        )
    return table


def curves(run: Recorded) -> list[RenderableType]:
    """Return the learning curve, a line for each reward and each of the user's metrics, and row counts."""
    parts: list[RenderableType] = []
    for metric in run.shares:
        which = f" on {run.table[metric].part}" if run.table[metric].part else ""
        if len(shares := run.curve(metric)) > 1:
            parts += [
                plain(f"held-out accuracy{which} after iterations"),
                chart({ALONE: shares}, CURVE, LINES),
            ]
    own = run.keys(is_own)[:OWN]
    rewards = run.keys(is_mean)
    named = {"reward" if len(rewards) == 1 else run.table[name].node: name for name in rewards} | dict(
        zip(own, own, strict=True)
    )
    drawn = {
        label: [value for _, value in curve]
        for label, name in named.items()
        if len(curve := run.curve(name)) > 1
    }
    margin = max(map(len, drawn), default=0)
    parts += [
        plain(f"{label:<{margin}}  {sparkline(values)}  {values[0]:.4g} → {values[-1]:.4g}")
        for label, values in drawn.items()
    ]
    costs = run.costs
    if costs.trained is not None:
        parts.append(plain(f"trained on {costs.trained:,} of {costs.sampled:,} sampled rows"))
    return parts


def sparkline(values: Sequence[float], width: int = CURVE) -> str:
    """Draw a curve in at most ``width`` characters.

    The values are split into equal parts. Each character shows the mean of one part, scaled to the range of
    all means.
    """
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(
        BARS[round((mean - low) / (high - low) * (len(BARS) - 1)) if high > low else 0] for mean in means
    )


def last(summary: RunSummary, folder: Path) -> RenderableType | None:
    """Return the last iteration's numbers and slowest nodes, or None if there aren't any."""
    numbers = figures(Frame(metrics=summary.figures))
    stages = sorted(stage_seconds(folder).items(), key=lambda item: -item[1])[:4]
    lines = ["last iteration: " + "  ".join(f"{name} {value}" for name, value in numbers)] if numbers else []
    lines += funnel_lines(summary.figures)
    lines += (
        ["slowest nodes: " + "  ".join(f"{name} {format_duration(seconds)}" for name, seconds in stages)]
        if stages
        else []
    )
    return plain("\n".join(lines)) if lines else None


def bounds(folder: Path) -> RenderableType | None:
    """Return the end of bounds.txt, which says what limited the run's speed, or None if there is none."""
    lines = bound_lines(folder)
    return plain("\n".join(lines)) if lines else None


def depends(folder: Path) -> RenderableType | None:
    """Return what the run's numbers depend on besides settings and graph, or None if nothing is recorded.

    Each model folder, reward and data file has a line with its digests. Versions are on the last line.
    """
    identity = read_object(folder / "identity.json")
    digests, versions, weights = (identity.get(name) for name in ("kept", "told", "weights"))
    parts: dict[str, list[str]] = {}
    for name in digests if isinstance(digests, dict) else ():
        head, _, part = str(name).partition(": ")
        parts.setdefault(head, []).append(f"{part} {_short(digests[name])}".strip())  # type: ignore[index]
    for name, file in weights.items() if isinstance(weights, dict) else ():
        head, _, part = str(name).partition(": ")
        digest = file.get("sha256") if isinstance(file, dict) else None
        parts.setdefault(head, []).insert(
            0, f"{part} {_short(f'sha256 {digest}') if digest else 'not read yet'}"
        )
    lines = [f"  {head}: {listed(values, PARTS)}" for head, values in parts.items()]
    lines += [f"  {_pairs(versions)}"] if isinstance(versions, dict) and versions else []
    return plain("\n".join(["depends on", *lines])) if lines else None


def _short(value: object) -> str:
    """Shorten a value for display. Digests are cut to 12 characters."""
    kind, _, digits = str(value).partition(" ")
    return f"{kind} {digits[:12]}" if kind in ("sha256", "digest") else str(value)[:40]


def notes(folder: Path) -> RenderableType | None:
    """Return the run's last ten notes, or None if there are none."""
    try:
        lines = durable.read(folder / NOTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    omitted = [f"… {len(lines) - 10} more in {NOTES}"] if len(lines) > 10 else []
    return plain("\n".join([*omitted, *lines[-10:]])) if lines else None


def services(folder: Path) -> RenderableType | None:
    """Return the run's services, or None if there are none."""
    lines = list(served.lines(folder))
    return plain("\n".join(["services", *(f"  {line}" for line in lines)])) if lines else None


def files(folder: Path) -> RenderableType:
    """Return a line that lists the run's files with a description of each."""
    present = [f"{name} ({about})" for name, about in FILES.items() if (folder / name).exists()]
    return plain(f"files: {listed(present)}")


def plain(text: str) -> Text:
    """Return a string without markup.

    Control characters are escaped so that they can't control the terminal.
    """
    return Text(printable(text))


def output(parts: Iterable[RenderableType]) -> None:
    """Print to standard output at the terminal's width, or at WIDE columns if it isn't a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
