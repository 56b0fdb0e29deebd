"""What the raylet of a lean Ray starts in place of an agent: a process that waits until the raylet ends.

A raylet refuses to start without agents, and ends when one of them does. This program starts within
milliseconds: it imports the standard library alone.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # started without the packages of the environment
    sys.path.append(str(Path(__file__).parents[2]))

    from rlflow.processes.watchdog import kin

    kin.die_with_raylet()
    signal.pause()
