"""`rlflow import`: a configuration file made of another project's settings."""

from __future__ import annotations

import os
from pathlib import Path

from rlflow.checkpoints import durable
from rlflow.errors import PlanError, nearest, printable

LONGEST = 1 << 20  # bytes of a file that is read


def import_settings(project: str, file: Path, out: Path) -> int:
    """Write what a script or a configuration of another project becomes, and say of each of its keys what that is. Raises PlanError where
    one of them changes the mathematics and has no counterpart; nothing is written then."""
    from rlflow.cli.importers import openrlhf, verl

    projects = {"verl": verl, "openrlhf": openrlhf}
    if project not in projects:
        raise PlanError.of("import", f"settings of '{project}' cannot be imported", found=project, expected="verl or openrlhf",
                           nearest=nearest(project, projects), remedy="docs/moving.md says how they are called here")  # fmt: skip
    _check_out(file, out)
    settings = projects[project].imported(projects[project].read(_text(file), str(file)))
    print(printable("\n".join(settings.report())))
    PlanError.refuse(settings.refusals(str(file)))
    durable.replace(out, settings.toml(str(out)).encode())
    print(f"wrote {printable(str(out))}: rlflow run {settings.flow} --config {printable(str(out))}")
    return 0


def _check_out(file: Path, out: Path) -> None:
    """Refuse to write over the file that is read, and over what is no file."""
    if out.exists() and (not out.is_file() or (file.exists() and out.samefile(file))):
        found = "the file that is read" if out.is_file() else "no regular file"
        raise PlanError.of("import", f"--out {out} cannot be written", found=found,
                           expected="a new file, or a configuration to replace", remedy="name another file with --out")  # fmt: skip


def _text(file: Path) -> str:
    """The text of a regular file of at most LONGEST bytes. Raises PlanError."""
    expected = f"a script of at most {LONGEST >> 20} MiB, or of verl a .yaml"
    try:
        data = durable.read(Path(os.path.realpath(file)), LONGEST)
        if len(data) <= LONGEST:
            return data.decode()
        found = "a longer file"
    except (OSError, UnicodeDecodeError) as error:
        found = str(error)
    raise PlanError.of("import", f"'{file}' cannot be read", found=found, expected=expected, remedy="name a file that is there")
