"""`rlflow resume` and `rlflow export`: continue a run, and export its models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlflow.cli.run import report
from rlflow.config.flags import parse_flags
from rlflow.errors import listed, printable


def resume_run(run: str, arguments: Sequence[str], fork: bool, trust: bool = False) -> int:
    """Continue a run or, with ``fork``, start a new run from it. Returns the exit code.

    Raises PlanError, RunHeld and StageError.
    """
    flags = parse_flags(arguments)
    quiet, as_json = bool(flags.pop("quiet", False)), bool(flags.pop("json", False))

    from rlflow.monitoring.history import find_run
    from rlflow.monitoring.outputs import make_reporter
    from rlflow.runs import resume

    reporter = make_reporter(quiet, as_json, flags.get("track", ()), metrics_port=flags.get("metrics_port"))
    result = (resume.fork if fork else resume.resume)(find_run(run), flags, reporter, trust)
    return report(result, reporter, as_json)


def export_model(run: str, out: str, role: str | None) -> int:
    """Export a run's newest intact checkpoint as a plain Hugging Face folder, and return the exit code.

    ``role``: which model to export, if the run trains several.
    """
    from rlflow.checkpoints.export import export
    from rlflow.checkpoints.file_names import MANIFEST
    from rlflow.monitoring.history import find_run

    source = Path(run)  # can also be the folder of a single checkpoint
    loaded = export(source if (source / MANIFEST).is_file() else find_run(run), Path(out), role)
    for path, reason in loaded.rejected:
        print(f"{path.name} is damaged and is not used: {reason}")
    if loaded.ignored:
        print(
            f"{loaded.path.name}: ignored files that are not part of it: {printable(listed(loaded.ignored))}"
        )
    print(f"wrote {out} from {loaded.path}")
    return 0
