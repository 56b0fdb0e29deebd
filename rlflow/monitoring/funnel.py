"""Describe an iteration's funnel: how many rows were trained on, how many tokens changed the weights."""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.author.figures import Figure, Of
from rlflow.monitoring.keys import Figures

CHAIN = {"sampled": "sampled", "kept": "kept", "scored": "scored", "used": "used"}  # each a part of the last
# rows that teach something; an update may also use others
TELLING = {"mixed": "in groups with unequal scores", "untruncated": "not truncated"}
TOKENS = "funnel/tokens"
CLIPPED = {"clipped_above": "above", "clipped_below": "below"}


def funnel_lines(figures: Figures) -> list[str]:
    """Return a line about the rows of each trained role, and one about the tokens of each update.

    Steps of the funnel that the algorithm doesn't have are left out.
    """
    return [*_rows(figures), *_tokens(figures)]


def _rows(figures: Figures) -> Iterator[str]:
    steps = {f"funnel/rows_{name}" for name in (*CHAIN, *TELLING)}
    roles = dict.fromkeys(one.role for one in figures if one.of is Of.ROWS and one.name in steps)
    for role in roles:

        def known(words: dict[str, str], role: str = role) -> list[str]:
            counts = {
                text: figures.get(Figure(Of.ROWS, f"funnel/rows_{name}", role=role))
                for name, text in words.items()
            }
            return [f"{count:,.0f} {text}" for text, count in counts.items() if count is not None]

        parts = (" → ".join(known(CHAIN)), ", of these ".join(known(TELLING)))
        yield f"rows{f' of {role}' if role else ''}: " + "; ".join(filter(None, parts))


def _tokens(figures: Figures) -> Iterator[str]:
    for update in (figure for figure in figures if figure.of is Of.UPDATE and figure.name == TOKENS):

        def of(name: str, update: Figure = update) -> float | None:
            return figures.get(update._replace(name=f"{TOKENS}_{name}"))

        if (moving := of("with_gradient")) is None:
            continue
        clipped = [
            f"{value:,.0f} {words}" for side, words in CLIPPED.items() if (value := of(side)) is not None
        ]
        yield (
            f"tokens of {update.node}: {figures[update] or 0.0:,.0f} → {moving:,.0f} with a gradient → "
            f"{of('effective') or 0.0:,.0f} effective"
            + (f"; clipped {', '.join(clipped)}" if clipped else "")
        )
