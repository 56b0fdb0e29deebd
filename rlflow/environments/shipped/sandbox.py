"""Runs code in this process, which can only compute.

Run as ``python -m rlflow.environments.shipped.sandbox FOLDER MEGABYTES [FILE]``. With a file the code is in that, and standard input is the
code's own.
"""

from __future__ import annotations

import os
import resource
import sys
import traceback
from pathlib import Path

from rlflow.isolation import limits, walls
from rlflow.watchdog import kin


def main() -> None:
    """Put up the walls, read the code, run it."""
    kin.die_with(os.getppid())
    folder, megabytes = sys.argv[1], int(sys.argv[2])
    code = Path(sys.argv[3]).read_text() if sys.argv[3:] else sys.stdin.read()
    limits.take({resource.RLIMIT_DATA: megabytes << 20})
    walls.around_scorers(folder)
    walls.around_answers()
    try:
        exec(compile(code, "code", "exec"), {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException as error:
        sys.stdout.flush()
        sys.stderr.write("".join(traceback.format_exception_only(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
