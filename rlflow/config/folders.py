"""Check the model folders in flags, before anything slow is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.errors import PlanError, nearest


def model_folder(text: str, flags: str = "--model") -> Path:
    """Return the folder of a model. Raises PlanError if it does not exist or has no config.json.

    ``flags``: the flags that can name a different folder, for the error message.
    """
    folder = Path(text)
    if (folder / "config.json").is_file():
        return folder
    siblings = (
        [str(path.parent) for path in folder.parent.glob("*/config.json")] if folder.parent.is_dir() else []
    )
    source = folder if len(folder.parts) == 2 else "OWNER/NAME"
    if not folder.is_dir():
        raise PlanError.of(
            "model-folder",
            f"there is no model folder '{folder}'",
            found=f"no folder at {folder.absolute()}",
            expected="a folder with config.json and weights",
            nearest=nearest(str(folder), siblings),
            remedy=f"correct the path of {flags}, or run the command in the folder from which the path starts; rlflow "
            f"does not download models: hf download {source} --local-dir FOLDER",
        )
    raise PlanError.of(
        "model-folder",
        f"'{folder}' is not a Hugging Face model folder",
        found="no config.json in it",
        expected="a folder with config.json and weights",
        nearest=nearest(str(folder), siblings),
        remedy=f"give another folder with {flags}; rlflow does not download models: hf download {source} "
        "--local-dir FOLDER",
    )


def check_model_folders(values: Mapping[str, Any]) -> None:
    """Raise PlanError for the first ``--model`` or ``--ROLE.model`` that is not a model folder.

    The check takes a fraction of a second; importing PyTorch would take seconds.
    """
    for name, value in values.items():
        if (
            (name == "model" or name.endswith(".model"))
            and not name.startswith(("hp.", "data."))
            and isinstance(value, str)
        ):
            model_folder(value, f"--{name}")
