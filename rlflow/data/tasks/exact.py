"""A reward for sums that a model proposes: 1 if the response is the answer."""


def exact(completion: str, answer: str) -> float:
    """Return 1.0 if the completion equals the answer, else 0.0."""
    return float(completion.strip() == answer)
