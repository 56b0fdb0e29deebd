"""Small runs of the packaged model on sums, prepared but not started."""

from __future__ import annotations

import json
from pathlib import Path

import rlflow.data.tasks
from rlflow.author.load import load_flow
from rlflow.runs.api import resolve_config
from rlflow.runs.prepare import prepare

MODEL = f"{next(iter(rlflow.data.tasks.__path__))}/arithmetic_model"
PAIR = {"chosen": " 1", "rejected": " 22"}
COLUMNS = {"dpo": PAIR, "tr_dpo": PAIR, "sft": {"completion": " 1"}}


def prepared(folder, file, **settings):
    """Return the context of a run of this file, with its data in a folder; the caller closes it."""
    columns = COLUMNS.get(Path(file).stem, {"answer": "1"})
    rows = [
        {
            "prompt": f"{a} + {b} =",
            **{name: value.replace("1", str(a + b)) for name, value in columns.items()},
        }
        for a in range(10, 30)
        for b in range(10, 20)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, hp = resolve_config(
        load_flow(file),
        None,
        {"model": MODEL, "data": (str(folder / "sums.jsonl"),), "held_out": 0, "threads": 1, **settings},
    )
    return prepare(load_flow(file), hp, config, judge=None)
