"""Shell lines that let several machines join one Ray cluster, with a deadline."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

JOIN_SECONDS = 900  # time limit for machines to join the run's Ray cluster, from the start of their shell


def within(condition: str, failure: str) -> list[str]:
    """Return shell lines that repeat ``condition`` until it succeeds.

    After JOIN_SECONDS, they print ``failure`` and exit with status 1.
    """
    return [
        f"until {condition}; do",
        (
            f"  if [ $SECONDS -ge {JOIN_SECONDS} ]; then echo {shlex.quote(f'{failure} within {JOIN_SECONDS} s')} "
            ">&2; exit 1; fi"
        ),
        "  sleep 5",
        "done",
    ]


def all_joined(count: int, address: str, failure: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return shell lines that wait until a Ray cluster has ``count`` machines.

    Otherwise, the run may find too few machines and refuse to start. ``address``: the cluster's address as
    Python code. ``arguments``: shell words that this code can read from ``sys.argv``.
    """
    code = (
        f"import ray{', sys' if arguments else ''}; ray.init(address={address}); "
        f'print(len([n for n in ray.nodes() if n["Alive"]]) >= {count})'
    )
    words = " ".join(["timeout 60 python -c", shlex.quote(code), *arguments])
    return within(f'[ "$({words} | tail -n 1)" = True ]', failure)
