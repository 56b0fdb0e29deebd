"""Check the model folders given by flags before importing anything slow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.data import hub
from rlflow.data.hub_names import hub_model
from rlflow.errors import PlanError, nearest


def model_folder(text: str, flags: str = "--model") -> Path:
    """Return the path of a model folder. Raises PlanError if it doesn't exist or has no config.json.

    A name on the Hub gives a folder in the cache, which may not have the weights yet. ``flags``: the flags
    that set the folder, for the error message.
    """
    if (name := hub_model(text)) is not None:
        return hub.described_model(hub.pinned(name))
    folder = Path(text)
    if (folder / "config.json").is_file():
        return folder
    siblings = (
        [str(path.parent) for path in folder.parent.glob("*/config.json")] if folder.parent.is_dir() else []
    )
    if folder.is_dir():
        what, found = f"'{folder}' is not a Hugging Face model folder", "no config.json in it"
        first = f"give another folder with {flags}"
    else:
        what, found = f"there is no model folder '{folder}'", f"no folder at {folder.absolute()}"
        first = f"correct the path of {flags}, or run the command in the folder from which the path starts"
    raise PlanError.of(
        "model-folder",
        what,
        found=found,
        expected="a folder with config.json and weights",
        nearest=nearest(str(folder), siblings),
        remedy=f"{first}; or name a model on the Hub: OWNER/NAME",
    )


def check_model_folders(values: Mapping[str, Any]) -> None:
    """Raise PlanError for the first ``--model`` or ``--ROLE.model`` that is not a model folder.

    Names on the Hub are skipped. This takes a fraction of a second; importing PyTorch takes several.
    """
    for name, value in values.items():
        if (
            (name == "model" or name.endswith(".model"))
            and not name.startswith(("hp.", "data."))
            and isinstance(value, str)
            and hub_model(value) is None
        ):
            model_folder(value, f"--{name}")
