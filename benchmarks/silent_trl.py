"""TRL's half of `benchmarks/silent.py`, in an interpreter that has TRL: trains with a reward function and
prints what TRL logs.

    python silent_trl.py SETTINGS      # a JSON object, as `silent.py` writes it

A line of JSON for each iteration that TRL logs, and one with the share of right held-out answers before and
after.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(settings: dict[str, Any]) -> None:
    """Train as the documentation of GRPOTrainer shows it, and print."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    sys.path.append(settings["peers"])
    from _held_out import accuracy  # type: ignore[import-not-found]

    data = Dataset.from_list([json.loads(line) for line in Path(settings["data"]).read_text().splitlines()])
    functions = runpy.run_path(settings["rewards"])
    rows = settings["prompts"] * settings["samples"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=settings["iterations"],
            seed=settings["seed"],
            logging_steps=1,
            use_cpu=True,
            num_generations=settings["samples"],
            max_completion_length=settings["tokens"],
            learning_rate=settings["lr"],
            per_device_train_batch_size=rows,
            gradient_checkpointing=False,
            bf16=False,
            lr_scheduler_type="constant",
            adam_beta2=settings["beta2"],
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = GRPOTrainer(settings["model"], functions[settings["function"]], config, data)

        def right() -> float:
            return accuracy(
                trainer.model,
                trainer.processing_class,
                settings["held_out"],
                settings["tokens"],  # type: ignore[no-any-return]
                lambda response, answer: functions["judge"]([response], [answer])[0],
                torch.float32,
            )

        before = right()
        trainer.train()
        for entry in trainer.state.log_history:
            print(json.dumps(entry))
        print(json.dumps({"before": before, "after": right()}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
