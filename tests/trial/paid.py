"""Two rewards that accept any text."""


def variety(completion):
    return len(set(completion)) / 20


def ended(finish):
    return float(finish == "stop")
