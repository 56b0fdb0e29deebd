"""A stand-in for one of the raylet's agents, which just waits until the raylet ends.

A raylet won't start without its agents, and ends when one of them does. This program starts within
milliseconds, because it imports only the standard library.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # the process is started without the packages of the environment
    sys.path.append(str(Path(__file__).parents[2]))

    from rlflow.processes.watchdog import process_tag

    process_tag.die_with_raylet()
    signal.pause()
