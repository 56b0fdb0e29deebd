"""Enters the sandbox and then runs code, which can do nothing but compute.

Run as ``python -m rlflow.rewards.environments.shipped.sandbox PARENT FOLDER MEGABYTES SECONDS FILE``. PARENT:
id of the parent process; this process ends when the parent does. FILE: the file with the code. The code may
read standard input.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from rlflow.processes.sandbox import sandboxes
from rlflow.processes.watchdog import process_tag


def main() -> None:
    """Enter the sandbox, then read and run the code."""
    process_tag.die_with(int(sys.argv[1]))
    folder, megabytes, seconds = sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    code = Path(sys.argv[5]).read_text("utf-8")
    sandboxes.around_code(folder, megabytes, seconds)
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
