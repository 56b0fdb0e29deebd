"""What `rlflow runs` and `rlflow show` print."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from rlflow import durable
from rlflow.errors import listed, printable
from rlflow.watch.frame import Frame, figures, spoken
from rlflow.watch.history import Growing, History, RunSummary, read_object, reward, stage_seconds, summarised
from rlflow.watch.recorder import NOTES

STYLES = {"running": "cyan", "done": "green", "failed": "red", "died": "red", "interrupted": "yellow"}
BARS = "▁▂▃▄▅▆▇█"
CURVE = 60  # signs of a curve
PARTS = 4  # of a model folder that are listed
WORDS = 3  # lines of bounds.txt that say in words what bounded the run
FILES = {
    "settings.json": "what it ran with", "identity.json": "what it depends on", "graph.txt": "one iteration",
    "metrics.jsonl": "all numbers", "samples.jsonl": "samples", "rewards.txt": "what rewards print",
    "answers.jsonl": "held-out answers before and after", "timeline.json": "times, for ui.perfetto.dev",
    "bounds.txt": "what bounded it", "bounds.json": "the same for tools", "weights.json": "what a sync moves", "final": "trained models",
    "tensorboard": "TensorBoard events", "wandb": "Weights & Biases",
}
TELLING = ("model", "data", "reward", "backend", "device", "dtype", "prompts", "seed")


def runs(found: Sequence[RunSummary], now: float) -> Table:
    """A line per run, the latest last."""
    table = Table("run", "flow", "state", "iteration", "accuracy", "reward", "age", box=None, padding=(0, 2, 0, 0))
    for one in sorted(found, key=lambda summary: summary.updated):
        accuracy, score = one.evaluation.get("evaluation/sampled"), reward(one.metrics)
        cells = (one.folder.name, one.flow)
        table.add_row(*(plain(cell) for cell in cells), state(one), f"{one.iteration}/{one.iterations}",
                      "" if accuracy is None else f"{accuracy:.1%}", "" if score is None else f"{score:.3f}",
                      spoken(max(now - one.updated, 0.0)))
    return table


def state(one: RunSummary) -> Text:
    return Text(one.state + (" (damaged)" if one.problem else ""), style=STYLES.get(one.state, ""))


def story(folder: Path) -> list[RenderableType]:
    """A run from its settings to its files."""
    found, history = summarised(folder), History()
    for line in Growing(folder / "metrics.jsonl").lines():
        history.add(line)
    age = spoken(max(time.time() - found.updated, 0.0))
    head = Text.assemble((printable(str(folder)), "bold"), "  ", plain(found.flow), "  ", state(found),
                         f"  {found.iteration}/{found.iterations} iterations, last written {age} ago")
    problems = [f"error: {found.error}"] if found.error else []
    problems += [found.problem] if found.problem else []
    problems += [f"metrics.jsonl: {history.damaged} lines cannot be read"] if history.damaged else []
    parts = [head, *(plain(line) for line in problems), settings(folder), learning(history), curves(history), last(found, folder)]
    return [part for part in [*parts, bounds(folder), notes(folder), depends(folder), files(folder)] if part is not None]


def settings(folder: Path) -> RenderableType | None:
    """The settings that say what the run is: the algorithm's, and those of the run that are set."""
    known = read_object(folder / "settings.json")
    lines = []
    for title, values, names in (("hp", known.get("hp"), None), ("run", known.get("options"), TELLING)):
        if isinstance(values, dict):
            chosen = {name: values[name] for name in (names or values) if values.get(name) not in (None, [], "")}
            lines.append(f"{title}: {_pairs(chosen)}")
    roles = known.get("roles")
    own = roles if isinstance(roles, dict) else {}
    lines += [f"{role}: {_pairs(values)}" for role, values in own.items() if isinstance(values, dict) and values]
    return plain("\n".join(lines)) if lines else None


def _pairs(values: Mapping[str, object]) -> str:
    return "  ".join(f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items())


def learning(history: History) -> RenderableType | None:
    """The first evaluation and the last."""
    if len(history.evaluations) < 2:
        return None
    (first, before), (end, after) = history.evaluations[0], history.evaluations[-1]
    table = Table("held-out accuracy", f"after {first}", f"after {end}", "change", box=None, padding=(0, 2, 0, 0))
    for name in before:
        if name in after:
            change = 100 * (after[name] - before[name])
            table.add_row(plain(name.rpartition("/")[2]), f"{before[name]:.1%}", f"{after[name]:.1%}", f"{change:+.1f} points")
    return table


def curves(history: History) -> RenderableType | None:
    """Reward and accuracy over the run, a sign for a stretch of it."""
    scores = [score for _, values in sorted(dict(history.iterations).items()) if (score := reward(values)) is not None]
    shares = [values.get("evaluation/sampled", 0.0) for _, values in sorted(dict(history.evaluations).items())]
    lines = [f"{name:<9} {sparkline(values)}  {values[0]:.3f} → {values[-1]:.3f}" for name, values in
             (("reward", scores), ("accuracy", shares)) if len(values) > 1]
    return Text("\n".join(lines)) if lines else None


def sparkline(values: Sequence[float], width: int = CURVE) -> str:
    """Means of stretches as bars between the lowest and the highest."""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(BARS[round((mean - low) / (high - low) * (len(BARS) - 1)) if high > low else 0] for mean in means)


def last(found: RunSummary, folder: Path) -> RenderableType | None:
    shown = figures(Frame(metrics=found.metrics))
    stages = sorted(stage_seconds(folder).items(), key=lambda item: -item[1])[:4]
    lines = ["last iteration: " + "  ".join(f"{name} {value}" for name, value in shown)] if shown else []
    lines += ["slowest nodes: " + "  ".join(f"{name} {spoken(seconds)}" for name, seconds in stages)] if stages else []
    return plain("\n".join(lines)) if lines else None


def bounds(folder: Path) -> RenderableType | None:
    """What bounded the run: the lines of words below the table."""
    try:
        lines = durable.read(folder / "bounds.txt").decode(errors="replace").splitlines()[-WORDS:]
    except OSError:
        return None
    return plain("\n".join(lines)) if lines else None


def depends(folder: Path) -> RenderableType | None:
    """What its numbers depend on beside settings and graph: each model folder, reward and file of data on a line, and versions."""
    known = read_object(folder / "identity.json")
    kept, told, weights = (known.get(name) for name in ("kept", "told", "weights"))
    parts: dict[str, list[str]] = {}
    for name in kept if isinstance(kept, dict) else ():
        head, _, part = str(name).partition(": ")
        parts.setdefault(head, []).append(f"{part} {_short(kept[name])}".strip())  # type: ignore[index]
    for name, file in weights.items() if isinstance(weights, dict) else ():
        head, _, part = str(name).partition(": ")
        digest = file.get("sha256") if isinstance(file, dict) else None
        parts.setdefault(head, []).insert(0, f"{part} {_short(f'sha256 {digest}') if digest else 'not read yet'}")
    lines = [f"  {head}: {listed(values, PARTS)}" for head, values in parts.items()]
    lines += [f"  {_pairs(told)}"] if isinstance(told, dict) and told else []
    return plain("\n".join(["depends on", *lines])) if lines else None


def _short(value: object) -> str:
    """A value for a line; of a digest its first letters."""
    kind, _, digits = str(value).partition(" ")
    return f"{kind} {digits[:12]}" if kind in ("sha256", "digest") else str(value)[:40]


def notes(folder: Path) -> RenderableType | None:
    """The last notes of the run."""
    try:
        lines = durable.read(folder / NOTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    more = [f"… {len(lines) - 10} more in {NOTES}"] if len(lines) > 10 else []
    return plain("\n".join([*more, *lines[-10:]])) if lines else None


def files(folder: Path) -> RenderableType:
    there = [f"{name} ({about})" for name, about in FILES.items() if (folder / name).exists()]
    return plain(f"files: {listed(there)}")


def plain(text: str) -> Text:
    """Text that is neither markup nor able to drive a terminal."""
    return Text(printable(text))


def output(parts: Iterable[RenderableType]) -> None:
    """Print to standard output: as wide as the terminal, or 160 columns where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
