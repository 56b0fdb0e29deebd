"""TRL's GRPOTrainer as in its documentation, with GRPOConfig's defaults except for SETTINGS."""

import json
import runpy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _held_out import accuracy  # type: ignore[import-not-found]
from _lengths import Recorded, ends_of  # type: ignore[import-not-found]

REQUIRES = ("trl==1.16.0", "torch", "transformers")
SETTINGS = {
    "use_cpu": True,  # the comparison measures CPUs
    # saves memory, which does not matter here, and would cost TRL a second forward
    "gradient_checkpointing": False,
    "lr_scheduler_type": "constant",  # as in the other systems
    "save_strategy": "no",  # the other systems do not save either
    "report_to": "none",  # no experiment tracker
    "disable_tqdm": True,  # no progress bar
}


class System:
    """The system that runs TRL's trainer. The trainer runs in a thread and waits between turns.

    ``cell["flags"]``: model, data, reward (FILE.py:function of completion and answer), prompts, samples,
    tokens (maximum number of tokens in a response), lengths (a file; without it, the model ends its responses
    itself), lr, dtype (bfloat16: autocast with float32 weights), iterations, held_out (a file of questions),
    eval_every.
    """

    def prepare(self, cell: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
        """Create the trainer."""
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        flags = self.flags = cell["flags"]
        self.rows: list[dict[str, Any]] = []
        self.sampled: list[int] = []
        self.error: BaseException | None = None
        self.left, self.ended = 0, False
        self.changed = threading.Condition()

        def reward(completions: list[str], completion_ids: list[list[int]], **fields: Any) -> list[float]:
            self.sampled.append(sum(len(ids) for ids in completion_ids))
            answers = fields.get("answer") or [""] * len(completions)
            return [
                self.score(completion, answer)
                for completion, answer in zip(completions, answers, strict=True)
            ]

        class Marks(TrainerCallback):  # type: ignore[misc]
            def on_step_end(marks, *_: Any, **__: Any) -> None:
                self.step_ended()

        file, _, name = flags["reward"].rpartition(":")
        self.score: Callable[[str, str], float] = runpy.run_path(file)[name]
        self.low = flags.get("dtype") == "bfloat16"
        self.evaluations: list[dict[str, Any]] = []
        batch = flags["prompts"] * flags["samples"]
        config = GRPOConfig(
            output_dir=f"{folder}/trl",
            max_steps=flags["iterations"],
            seed=seed,
            num_generations=flags["samples"],
            max_completion_length=flags["tokens"],
            per_device_train_batch_size=batch,
            learning_rate=flags["lr"],
            bf16=self.low,
            model_init_kwargs={"dtype": "float32"},
            **SETTINGS,
        )
        data = Dataset.from_list([json.loads(line) for line in Path(flags["data"]).read_text().splitlines()])
        self.trainer = GRPOTrainer(flags["model"], reward, config, data, callbacks=[Marks()])
        if "lengths" in flags:
            self.force(Recorded(flags["lengths"], ends_of(self.trainer.model, self.trainer.processing_class)))
        self.thread = threading.Thread(target=self.train, daemon=True)
        return {"iterations": flags["iterations"]}

    def force(self, lengths: Recorded) -> None:
        """Make the model sample responses of the recorded lengths."""
        model = self.trainer.model
        sample = model.generate

        def generate(*, input_ids: Any, **settings: Any) -> Any:
            processors = lengths.processors(lengths.take(len(input_ids)), input_ids.shape[1])
            return sample(input_ids=input_ids, logits_processor=processors, **settings)

        model.generate = generate

    def train(self) -> None:
        """Run the trainer. The trainer's thread executes this method."""
        try:
            self.wait()
            self.evaluate(0)
            self.mark = time.perf_counter()
            self.trainer.train()
        except BaseException as error:  # iterate() raises it
            self.error = error
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def step_ended(self) -> None:
        """Record an iteration. After the last iteration of a turn, wait for the next turn."""
        wall = time.perf_counter() - self.mark
        self.evaluate(len(self.rows) + 1)
        with self.changed:
            self.rows.append(
                {"iteration": len(self.rows), "wall": wall, "tokens": self.sampled.pop(), "metrics": {}}
            )
            self.left -= 1
            self.changed.notify_all()
        self.wait()

    def evaluate(self, number: int) -> None:
        """If an evaluation is due after ``number`` iterations, evaluate on the held-out questions.

        The time of evaluations does not count.
        """
        import torch

        flags = self.flags
        if "held_out" in flags and (number % flags["eval_every"] == 0 or number == flags["iterations"]):
            right = accuracy(
                self.trainer.model,
                self.trainer.processing_class,
                flags["held_out"],
                flags["tokens"],
                self.score,
                torch.bfloat16 if self.low else torch.float32,
            )
            self.evaluations.append({"iteration": number, "metrics": {"evaluation/held/greedy": right}})

    def wait(self) -> None:
        """Wait until the next turn begins."""
        with self.changed:
            self.changed.wait_for(lambda: self.left > 0 or len(self.rows) == self.flags["iterations"])
            self.mark = time.perf_counter()

    def iterate(self, count: int) -> dict[str, Any]:
        """Run the next iterations. Returns their wall seconds and numbers of sampled tokens."""
        if not self.thread.is_alive() and not self.ended:
            self.thread.start()
        with self.changed:
            before, self.evaluations = len(self.rows), []
            self.left += count
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.ended or self.left <= 0)
            if self.error is not None:
                raise self.error
            ended = len(self.rows) == self.flags["iterations"]
            return {"iterations": self.rows[before:], "evaluations": self.evaluations, "ended": ended}

    def observe(self) -> dict[str, Any]:
        """Return an empty dict, since this system adds no measurements of its own."""
        return {}

    def close(self) -> None:
        """Do nothing, since the thread ends with the process."""
