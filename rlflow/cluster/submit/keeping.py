"""Where a run that is started elsewhere keeps its folder: a bucket, a claim of a volume, or a path, which
outlives the run's machines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rlflow.errors import PlanError

FLAG = "--job.keep"
MOUNT = "/rlflow-runs"  # where a bucket or a volume appears in the run's machines
BUCKET = re.compile(r"(s3|gs|r2|cos|oci|nebius|cw|https)://[\w./:+-]+")
CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
PATH = re.compile(r"/[^\0\n]+")
# what each form can keep runs in
TAKEN = {"skypilot": ("bucket", "claim", "path"), "kuberay": ("claim", "path"), "ray": ("path",)}


@dataclass(frozen=True)
class Keep:
    """What keeps the folder of a run."""

    kind: Literal["bucket", "claim", "path"]
    name: str  # URL of the bucket, name of the claim, or the path

    @property
    def out(self) -> str:
        """The folder that holds the run's, on its machines."""
        return self.name if self.kind == "path" else MOUNT


def keep_of(text: str, form: str) -> Keep:
    """What a flag names. ``form``: of what is printed, a key of TAKEN. Raises PlanError for text that names
    nothing, and for what that form cannot keep runs in."""
    kinds: tuple[tuple[Literal["bucket", "claim", "path"], re.Pattern[str]], ...] = (
        ("bucket", BUCKET),
        ("path", PATH),
        ("claim", CLAIM),
    )
    keep = next((Keep(kind, text) for kind, pattern in kinds if pattern.fullmatch(text)), None)
    if keep is None or keep.kind not in TAKEN[form]:
        raise PlanError.of(
            "job-keep",
            f"{FLAG} names nothing in which --for {form} can keep a run",
            found=text,
            expected={
                "skypilot": "s3://BUCKET or another bucket's URL, the name of a volume, or an absolute path",
                "kuberay": "the name of a PersistentVolumeClaim, or an absolute path of the nodes",
                "ray": "an absolute path on the machine of Ray's head",
            }[form],
            remedy=f"{FLAG} {'s3://BUCKET/FOLDER' if form == 'skypilot' else 'CLAIM' if form == 'kuberay' else '/PATH'}",
        )
    return keep


def warning(form: str, keep: Keep | None, out: str) -> list[str]:
    """A line for whoever starts a run that nothing keeps; none for others. ``out``: of the run, as its flag
    says it; an absolute path is believed to stay, but for a pod's."""
    if keep is not None or (out.startswith("/") and form != "kuberay"):
        return []
    return [
        f"warning: nothing keeps this run: its checkpoints and models go with its machines. {FLAG} says "
        "where they are to stay"
    ]
