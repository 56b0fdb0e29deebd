"""Two rewards that any text has."""


def variety(completion):
    return len(set(completion)) / 20


def ended(finish):
    return float(finish == "stop")
