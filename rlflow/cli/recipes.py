"""`rlflow new NAME --recipe RECIPE`: copy a configuration file from ``examples/recipes``.

A recipe is a TOML file. If it needs its own reward, there is a Python file of the same name next to it.
"""

from __future__ import annotations

import re
from pathlib import Path

from rlflow.cli.new import exists, write_file
from rlflow.errors import PlanError, listed, nearest

FOLDER = "examples/recipes/"  # the path by which recipes refer to their own files


def recipes() -> dict[str, Path]:
    """Return the file of each recipe, by name, sorted."""
    from rlflow import recipes as shipped

    return {path.stem: path for path in sorted(Path(shipped.__path__[0]).glob("*.toml"))}


def purposes() -> dict[str, str]:
    """Return the purpose of each recipe, by name. It is the beginning of the recipe's first line."""
    return {
        name: path.read_text("utf-8").partition(": ")[0].removeprefix("# ")
        for name, path in recipes().items()
    }


def write_recipe(target: Path, name: str) -> int:
    """Copy the recipe ``name`` to the file ``target``, along with its reward if it has one. Returns 0.

    Raises PlanError if the recipe is unknown, the target's name is unsuitable, or a file exists or can't be
    written.
    """
    known = recipes()
    if name not in known:
        raise PlanError.of(
            "new-recipe",
            f"rlflow ships no recipe '{name}'",
            found=name,
            expected=listed(known, len(known)),
            nearest=nearest(name, known),
            remedy="choose one of these recipes; rlflow new --list describes them",
        )
    stem = target.with_suffix("") if target.suffix == ".toml" else target
    if not re.fullmatch(r"[\w.-]+", stem.name):
        raise PlanError.of(
            "new-name",
            f"'{stem.name}' cannot be the name of a recipe's copy",
            found=stem.name,
            expected="letters, digits, '.', '_' and '-'",
            remedy="choose another name",
        )
    sources = [path for path in (known[name].with_suffix(".py"), known[name]) if path.is_file()]
    copies = [stem.with_name(stem.name + path.suffix) for path in sources]
    if taken := [path for path in copies if path.exists()]:
        raise exists(taken[0])
    for source, copy in zip(sources, copies, strict=True):
        write_file(copy, source.read_text("utf-8").replace(f"{FOLDER}{name}.", f"{stem}."))
        print(f"wrote {copy}")
    print(f"  rlflow check grpo --config {copies[-1]}\n  rlflow run grpo --config {copies[-1]}")
    return 0
