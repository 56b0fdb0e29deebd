"""A second reward for the packaged sums: 1 if an answer is a number."""


def number(completion: str) -> float:
    """Return 1.0 for digits with at most one sign before them, else 0.0."""
    return float(completion.strip().removeprefix("-").isdecimal())
