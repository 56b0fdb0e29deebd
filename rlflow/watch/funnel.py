"""The funnel of an iteration in words: which rows are left to learn from, and how many tokens of them move the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

ROWS = {"sampled": "sampled", "kept": "kept", "scored": "scored", "mixed": "in groups that differ", "untruncated": "not truncated",
        "used": "used"}  # fmt: skip
HEAD, TOKENS = "funnel/rows_", "funnel/tokens"
CLIPPED = {"clipped_above": "above", "clipped_below": "below"}


def funnel_lines(metrics: Mapping[str, float]) -> list[str]:
    """A line for the rows of the iteration, of each role where several are trained, and one for the tokens of each update; none for what
    an algorithm has not."""
    return [*_rows(metrics), *_tokens(metrics)]


def _rows(metrics: Mapping[str, float]) -> Iterator[str]:
    for role in dict.fromkeys(name.partition(HEAD)[0] for name in metrics if HEAD in name):
        steps = [f"{metrics[f'{role}{HEAD}{name}']:,.0f} {words}" for name, words in ROWS.items()
                 if metrics.get(f"{role}{HEAD}{name}") is not None]  # fmt: skip
        yield f"rows{f' of {role}' if role else ''}: ".replace("/:", ":") + " → ".join(steps)


def _tokens(metrics: Mapping[str, float]) -> Iterator[str]:
    for name in metrics:
        update = name.removesuffix(TOKENS).rstrip("/")
        if not name.endswith(f"/{TOKENS}") or metrics.get(f"{name}_with_gradient") is None:
            continue
        tokens, moving, effective = (metrics.get(each) or 0.0 for each in (name, f"{name}_with_gradient", f"{name}_effective"))
        clipped = [f"{metrics[f'{name}_{side}']:,.0f} {words}" for side, words in CLIPPED.items()
                   if metrics.get(f"{name}_{side}") is not None]  # fmt: skip
        yield (f"tokens of {update}: {tokens:,.0f} → {moving:,.0f} with a gradient → {effective:,.0f} by its size"
               + (f"; clipped {', '.join(clipped)}" if clipped else ""))

