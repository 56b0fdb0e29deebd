"""`rlflow import`: a configuration file made of another project's settings."""

from __future__ import annotations

from pathlib import Path

from rlflow import durable
from rlflow.errors import PlanError, nearest, printable


def import_settings(project: str, file: Path, out: Path) -> int:
    """Write what a script or a configuration of another project becomes, and say of each of its keys what that is. Raises PlanError where
    one of them changes the mathematics and has no counterpart; nothing is written then."""
    from rlflow.moving import openrlhf, verl

    projects = {"verl": verl, "openrlhf": openrlhf}
    if project not in projects:
        raise PlanError.of("import", f"settings of '{project}' cannot be imported", found=project, expected="verl or openrlhf",
                           nearest=nearest(project, projects), remedy="docs/moving.md says how they are called here")  # fmt: skip
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError.of("import", f"'{file}' cannot be read", found=str(error), expected="a script, or of verl a .yaml",
                           remedy="name a file that is there") from error  # fmt: skip
    settings = projects[project].imported(projects[project].read(text, str(file)))
    print(printable("\n".join(settings.report())))
    if settings.unsupported:
        raise settings.refusal(str(file))
    durable.replace(out, settings.toml(str(out)).encode())
    print(f"wrote {printable(str(out))}: rlflow run {settings.flow} --config {printable(str(out))}")
    return 0
