"""Parses names of models and data sets on the Hugging Face Hub, without using the network.

A model is written ``OWNER/NAME[@REVISION]``, and a data set ``OWNER/NAME[@REVISION][:CONFIG][/SPLIT]``. If
the text also names a local file or folder, that is used instead.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

COMMIT = re.compile(r"[0-9a-f]{40}")
REPOSITORY = r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
MODEL = re.compile(rf"{REPOSITORY}(?:@(?P<revision>[\w./-]+))?")
DATA = re.compile(
    rf"{REPOSITORY}(?:@(?P<revision>refs/[\w/-]+|[\w.-]+))?(?::(?P<config>[\w.-]+))?(?:/(?P<split>[\w.-]+))?"
)
# A string with one of these suffixes names a file on this machine, even if the file is missing.
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".py", ".toml", ".gz", ".zip")
SNAPSHOT = re.compile(r"(?P<kind>models|datasets)--(?P<repository>.+)/snapshots/(?P<commit>[0-9a-f]{40})")
SHOWN = 12  # digits of a commit in messages


@dataclass(frozen=True)
class HubName:
    """A repository on the Hub, as named by the user. ``str()`` returns the name as a string."""

    kind: Literal["model", "dataset"]
    repository: str  # OWNER/NAME
    revision: str | None = None  # branch, tag or commit; None: the main branch
    config: str | None = None  # of a data set; None: its only or default one
    split: str | None = None  # of a data set

    def __str__(self) -> str:
        return f"{self._at(self.revision)}{self._part}"

    @property
    def shown(self) -> str:
        """The name for messages, with a short commit."""
        return f"{self._at(self.commit[:SHOWN] if self.commit else self.revision)}{self._part}"

    @property
    def stem(self) -> str:
        """The last part of the repository's name."""
        return self.repository.partition("/")[2]

    @property
    def commit(self) -> str | None:
        """The commit that the name is pinned to, or None if it names a branch or a tag."""
        return self.revision if self.revision and COMMIT.fullmatch(self.revision) else None

    @property
    def without_part(self) -> HubName:
        """The name of the repository, without the config and split."""
        return replace(self, config=None, split=None)

    @property
    def _part(self) -> str:
        return f"{f':{self.config}' if self.config else ''}{f'/{self.split}' if self.split else ''}"

    def _at(self, revision: str | None) -> str:
        return f"{self.repository}@{revision}" if revision else self.repository


def hub_model(text: str) -> HubName | None:
    """Parse the Hub name of a model. Returns None for text of another form, or for an existing path."""
    found = _match(MODEL, text)
    return HubName("model", found["repository"], found["revision"]) if found else None


def hub_data(text: str) -> HubName | None:
    """Parse the Hub name of a data set. Returns None for text of another form, or for an existing path."""
    found = _match(DATA, text)
    if found is None:
        return None
    return HubName("dataset", found["repository"], found["revision"], found["config"], found["split"])


def local_instead(text: str) -> bool:
    """True if a string has the form of a Hub name, but is an existing path."""
    form = MODEL.fullmatch(text) or DATA.fullmatch(text)
    return form is not None and not text.endswith(SUFFIXES) and os.path.exists(text)


def snapshot_of(folder: Path) -> HubName | None:
    """Return the pinned name of the repository that a folder of the Hub's cache is a snapshot of, or None."""
    parts = folder.absolute().as_posix().rsplit("/", 3)
    found = SNAPSHOT.fullmatch("/".join(parts[1:])) if len(parts) == 4 else None
    if found is None:
        return None
    kind: Literal["model", "dataset"] = "model" if found["kind"] == "models" else "dataset"
    return HubName(kind, found["repository"].replace("--", "/", 1), found["commit"])


def folder_name(folder: Path) -> str:
    """Return a short name for a model's folder: the last part of its path, or of its Hub name."""
    name = snapshot_of(folder)
    return name.stem if name else folder.name


def _match(form: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = form.fullmatch(text)
    return None if found is None or text.endswith(SUFFIXES) or os.path.exists(text) else found
