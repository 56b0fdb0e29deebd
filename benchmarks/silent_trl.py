"""The TRL part of `benchmarks/silent.py`: train with a reward function and print TRL's log.

    python silent_trl.py SETTINGS      # a JSON object from `silent.py`

The interpreter must have TRL. The program prints a line of JSON for each logged iteration, and a line with
the held-out accuracy before and after training.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(settings: dict[str, Any]) -> None:
    """Train as in GRPOTrainer's documentation, and print the log."""
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
            """Return the share of right answers to the held-out questions."""
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
