"""Figures by the names that they have in metrics.jsonl, which tests are easier to read with."""

from rlflow.monitoring.keys import by_figure, completed


def figures(values):
    """The figures of numbers by name, as they are read from a folder without a table."""
    return by_figure(values, completed({}, values))


def keyed(found):
    """The numbers of figures by their names."""
    return {figure.key: value for figure, value in found.items()}
