"""Conversions between names in metrics.jsonl, which make tests easier to read, and figures."""

from rlflow.monitoring.keys import by_figure, completed


def figures(values):
    """Return the figures by name, as read from a folder without a table."""
    return by_figure(values, completed({}, values))


def keyed(found):
    """Return the numbers of figures by their names."""
    return {figure.key: value for figure, value in found.items()}
