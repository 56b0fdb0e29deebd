"""A second reward for the packaged sums task: 1 if the response is a number."""


def number(completion: str) -> float:
    """Return 1.0 if the completion is nothing but digits, with at most one sign before them, else 0.0."""
    return float(completion.strip().removeprefix("-").isdecimal())
