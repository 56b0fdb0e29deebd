"""Optional packages: imported when first needed, and missed with the line that installs them."""

from __future__ import annotations

import importlib
from typing import Any

from rlflow.errors import PlanError


def require(module: str, extra: str) -> Any:
    """The module of an optional package. Raises PlanError with the install line where the package is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        if (missing.name or "").partition(".")[0] != package:  # the package is there, and broken: its own message says more
            raise
        raise PlanError.of("missing-package", f"the package '{package}' is not installed", expected=f"{package}, of the extra '{extra}'",
                           remedy=f"pip install 'rlflow-dag[{extra}]'") from missing
