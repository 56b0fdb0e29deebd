"""Where to keep the folder of a run that is started elsewhere, so that it outlives the machines.

This can be a bucket, a Kubernetes volume claim, or a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rlflow.errors import PlanError

FLAG = "--job.keep"
MOUNT = "/rlflow-runs"  # mount point of a bucket or a volume on the run's machines
BUCKET = re.compile(r"(s3|gs|r2|cos|oci|nebius|cw|https)://[\w./:+-]+")
CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
PATH = re.compile(r"/[^\0\n]+")
# form of the printed text → kinds of storage that the form supports
SUPPORTED = {
    "skypilot": ("bucket", "claim", "path"),
    "kuberay": ("claim", "path"),
    "ray": ("path",),
    "slurm": ("path",),
}


@dataclass(frozen=True)
class Keep:
    """The storage that keeps a run's folder."""

    kind: Literal["bucket", "claim", "path"]
    name: str  # URL of the bucket, name of the claim, or the path

    @property
    def out(self) -> str:
        """The folder on the run's machines that contains the run's folder."""
        return self.name if self.kind == "path" else MOUNT


def keep_of(text: str, form: str) -> Keep:
    """Parse the value of --job.keep. ``form``: the form of the printed document, a key of SUPPORTED.

    Raises PlanError if the text doesn't name any storage, or names a kind that the form doesn't support.
    """
    kinds: tuple[tuple[Literal["bucket", "claim", "path"], re.Pattern[str]], ...] = (
        ("bucket", BUCKET),
        ("path", PATH),
        ("claim", CLAIM),
    )
    keep = next((Keep(kind, text) for kind, pattern in kinds if pattern.fullmatch(text)), None)
    if keep is None or keep.kind not in SUPPORTED[form]:
        raise PlanError.of(
            "job-keep",
            f"{FLAG} does not name storage that --for {form} supports",
            found=text,
            expected={
                "skypilot": "s3://BUCKET or another bucket's URL, the name of a volume, or an absolute path",
                "kuberay": "the name of a PersistentVolumeClaim, or an absolute path of the nodes",
                "ray": "an absolute path on the machine of Ray's head",
                "slurm": "an absolute path that all nodes share",
            }[form],
            remedy=f"{FLAG} {'s3://BUCKET/FOLDER' if form == 'skypilot' else 'CLAIM' if form == 'kuberay' else '/PATH'}",
        )
    return keep


def warning(form: str, keep: Keep | None, out: str) -> list[str]:
    """Return a list with a warning if the run's folder would be lost with its machines, otherwise [].

    ``out``: the value of the run's --out. An absolute path counts as persistent, except in a pod, and so does
    the folder from which a Slurm job is submitted.
    """
    if keep is not None or form == "slurm" or (out.startswith("/") and form != "kuberay"):
        return []
    return [
        (
            f"warning: nothing keeps this run: its checkpoints and models are lost with its machines. Set {FLAG} to "
            "storage that outlives them"
        )
    ]
