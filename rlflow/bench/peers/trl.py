"""TRL's GRPOTrainer, as its documentation shows it, with the defaults of GRPOConfig but for SETTINGS, where the reason stands beside
each."""

import json
import threading
import time
from pathlib import Path
from typing import Any

from _lengths import Recorded, ends_of  # type: ignore[import-not-found]

REQUIRES = ("trl==1.16.0", "torch", "transformers")
SETTINGS = {
    "use_cpu": True,  # what is measured
    "bf16": False,  # float32, as the others
    "gradient_checkpointing": False,  # memory is no matter here, and it would cost TRL a second forward
    "lr_scheduler_type": "constant",  # as the others
    "save_strategy": "no",  # nobody saves
    "report_to": "none",  # nobody tracks
    "disable_tqdm": True,  # nobody draws
}


def digits(completion: str) -> float:
    """The reward: the share of digits."""
    return sum(letter in "0123456789" for letter in completion) / max(len(completion), 1)


class System:
    """``cell["flags"]``: model, data, prompts, samples, tokens (the longest response), lengths (a file; without it rows end by themselves),
    lr, iterations. The trainer runs in a thread that waits for its turns."""

    def prepare(self, cell: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
        """Make the trainer."""
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        flags = self.flags = cell["flags"]
        self.rows: list[dict[str, Any]] = []
        self.sampled: list[int] = []
        self.error: BaseException | None = None
        self.left, self.ended = 0, False
        self.changed = threading.Condition()

        def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
            self.sampled.append(sum(len(ids) for ids in completion_ids))
            return [digits(completion) for completion in completions]

        class Marks(TrainerCallback):  # type: ignore[misc]
            def on_step_end(marks, *_: Any, **__: Any) -> None:
                self.step_ended()

        batch = flags["prompts"] * flags["samples"]
        config = GRPOConfig(output_dir=f"{folder}/trl", max_steps=flags["iterations"], seed=seed, num_generations=flags["samples"],
                            max_completion_length=flags["tokens"], per_device_train_batch_size=batch, learning_rate=flags["lr"], **SETTINGS)
        data = Dataset.from_list([json.loads(line) for line in Path(flags["data"]).read_text().splitlines()])
        self.trainer = GRPOTrainer(flags["model"], reward, config, data, callbacks=[Marks()])
        if "lengths" in flags:
            self.force(Recorded(flags["lengths"], ends_of(self.trainer.model, self.trainer.processing_class)))
        self.thread = threading.Thread(target=self.train, daemon=True)
        return {"iterations": flags["iterations"]}

    def force(self, lengths: Recorded) -> None:
        """Let the model sample rows of recorded lengths."""
        model = self.trainer.model
        sample = model.generate

        def generate(*, input_ids: Any, **settings: Any) -> Any:
            processors = lengths.processors(lengths.take(len(input_ids)), input_ids.shape[1])
            return sample(input_ids=input_ids, logits_processor=processors, **settings)

        model.generate = generate

    def train(self) -> None:
        """The thread of the trainer."""
        try:
            self.wait()
            self.trainer.train()
        except BaseException as error:  # told to whoever waits
            self.error = error
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def step_ended(self) -> None:
        """Keep an iteration, and wait where it was the last of a turn."""
        with self.changed:
            wall = time.perf_counter() - self.mark
            self.rows.append({"iteration": len(self.rows), "wall": wall, "tokens": self.sampled.pop(), "metrics": {}})
            self.left -= 1
            self.changed.notify_all()
        self.wait()

    def wait(self) -> None:
        """Wait for a turn."""
        with self.changed:
            self.changed.wait_for(lambda: self.left > 0 or len(self.rows) == self.flags["iterations"])
            self.mark = time.perf_counter()

    def iterate(self, count: int) -> dict[str, Any]:
        """The next iterations, with their wall seconds and sampled tokens."""
        if not self.thread.is_alive() and not self.ended:
            self.thread.start()
        with self.changed:
            before = len(self.rows)
            self.left += count
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.ended or self.left <= 0)
            if self.error is not None:
                raise self.error
            ended = len(self.rows) == self.flags["iterations"]
            return {"iterations": self.rows[before:], "evaluations": [], "ended": ended}

    def observe(self) -> dict[str, Any]:
        """Nothing beside what every cell is measured by."""
        return {}

    def close(self) -> None:
        """The thread ends with the process."""
