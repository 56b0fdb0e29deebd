"""Model folders that flags name, looked at before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.errors import PlanError, nearest


def model_folder(text: str, flags: str = "--model") -> Path:
    """The folder of a model. ``flags``: the flags that could name another. Raises PlanError for one without a
    config.json."""
    folder = Path(text)
    if (folder / "config.json").is_file():
        return folder
    siblings = (
        [str(path.parent) for path in folder.parent.glob("*/config.json")] if folder.parent.is_dir() else []
    )
    source = folder if len(folder.parts) == 2 else "OWNER/NAME"
    raise PlanError.of(
        "model-folder",
        f"'{folder}' is no Hugging Face model folder",
        found="no config.json there",
        expected="a folder with config.json and weights",
        nearest=nearest(str(folder), siblings),
        remedy=f"name another folder with {flags}; nothing is downloaded: hf download {source} "
        "--local-dir FOLDER",
    )


def check_model_folders(values: Mapping[str, Any]) -> None:
    """Raise PlanError for the first ``--model`` or ``--ROLE.model`` that is no model folder. A wrong one is
    told in a fraction of a second; PyTorch alone takes seconds to import."""
    for name, value in values.items():
        if (
            (name == "model" or name.endswith(".model"))
            and not name.startswith(("hp.", "data."))
            and isinstance(value, str)
        ):
            model_folder(value, f"--{name}")
