"""A process that a lean Ray starts in place of each raylet agent. It waits until the raylet ends.

A raylet needs its agents: it refuses to start without them, and ends when one of them ends. This program
starts within milliseconds, because it imports only the standard library.
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
