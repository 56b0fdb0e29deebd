"""An episode of a run as `rlflow show` prints it: what the model and its environment said, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from rlflow.checkpoints.logs import objects, tail

LONGEST = 400  # characters of what is said in a turn that are shown


def last_episode(folder: Path) -> Text | None:
    """The last sample of more than one turn, else the last of any; None where no sample is an episode."""
    rows = [row for row in objects(tail(folder / "samples.jsonl")) if isinstance(row.get("episode"), dict)]
    several = [row for row in rows if len(turns_of(row)) > 1]
    row = next(iter((several or rows)[::-1]), None)
    return Text("\n".join(lines(row))) if row is not None else None


def turns_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The turns of a sample."""
    turns = row["episode"].get("turns")
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def lines(row: Mapping[str, Any]) -> Iterator[str]:
    """A line for the prompt, for each turn, and for its end."""
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
    yield f"  end: {row.get('finish')}" + (f", score {score:g}" if isinstance(score, int | float) else "") + (
        f"; {shown(episode['failed'])}" if "failed" in episode else "")


def shown(words: Any) -> str:
    """Text, or messages, on one line."""
    if isinstance(words, list):
        words = " ".join(f"[{each.get('role')}] {each.get('content')}" for each in words if isinstance(each, dict))
    text = repr(str(words))[1:-1]
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
