"""Train the packaged model with the `sft` flow on answers from a simulated pupil who makes mistakes.

    python -m rlflow.benchmarks.arithmetic FOLDER      # make base-model

Writes FOLDER/arithmetic_model, FOLDER/arithmetic_teacher, FOLDER/arithmetic_lessons.jsonl and
FOLDER/arithmetic_pairs.jsonl.

A first training uses correct answers to two-digit sums and differences. A second training uses the pupil's
answers. The pupil often forgets the carry or the minus sign, and gets digits wrong. Afterwards, the model
knows the right answer, but prefers a wrong answer if the pupil is wrong more often than right. Reinforcement
learning therefore has to change a preference of the model, not only random errors. The data contain no
held-out question of the packaged task.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from rlflow.config.packaged import packaged
from rlflow.data.dataset import Dataset
from rlflow.data.source import open_data
from rlflow.runs.run import run
from rlflow.training import pretrained

SEED = 0
COPIES = 4  # number of the pupil's answers to each question
LESSONS = 2000  # right answers shipped with the model for the `sft` flow
PAIRS = 2000  # pairs of a right and a wrong answer, shipped for the `dpo` and `reward_model` flows
# probabilities that the pupil forgets a carry or a sign, and that one digit is wrong
FORGETS, SLIPS = 0.65, 0.25
DRAWN = 60000  # questions drawn for the pupil; the packaged task draws fewer, so that a run starts fast


def make(folder: Path) -> None:
    """Write the model with its tokenizer, the teacher, and the packaged data into ``folder``."""
    training = questions()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        blank(work / "blank", [record.prompt for record in training.records])
        right, erring = work / "right.jsonl", work / "erring.jsonl"
        _write(right, lessons(training, 1, 0.0, 0.0))
        _write(erring, lessons(training, COPIES, FORGETS, SLIPS))
        trained = _trained(work / "blank", right, 2400, work / "runs", lr=8e-4, warmup=50)
        final = _trained(trained, erring, 1600, work / "runs", lr=4e-4, schedule="linear")
        shutil.copytree(final, folder / "arithmetic_model", dirs_exist_ok=True)
        write_data(folder, training)
        shutil.copytree(teacher(folder, work / "runs"), folder / "arithmetic_teacher", dirs_exist_ok=True)


def teacher(folder: Path, out: Path) -> Path:
    """Train the packaged model on a part of the lessons, save it in bfloat16, and return its folder.

    The result is the teacher in the `distill` flow.
    """
    from transformers import AutoModelForCausalLM

    trained = _trained(folder / "arithmetic_model", folder / "arithmetic_lessons.jsonl", 100, out, lr=5e-4)
    pretrained.read_model(AutoModelForCausalLM, trained, dtype=torch.bfloat16).save_pretrained(trained)
    return trained


def write_data(folder: Path, training: Dataset) -> None:
    """Write the lessons and pairs that are packaged with the model. ``training``: the questions to use."""
    _write(folder / "arithmetic_lessons.jsonl", list(lessons(training, 1, 0.0, 0.0))[:LESSONS])
    _write(folder / "arithmetic_pairs.jsonl", islice(pairs(training), PAIRS))


def questions() -> Dataset:
    """Return questions like those of the packaged task, but none of its held-out questions."""
    values = packaged("default")[1]
    task = {name.removeprefix("data."): value for name, value in values.items() if name.startswith("data.")}
    source = values["data"][0]
    held_out = {
        record.question for record in open_data(source, task=task).split(values["held_out"])[1].records
    }
    candidates = open_data(source, task={**task, "size": DRAWN})
    return replace(
        candidates, records=[record for record in candidates.records if record.question not in held_out]
    )


def lessons(data: Dataset, copies: int, forgets: float, slips: float) -> Iterator[dict[str, str]]:
    """Yield each question ``copies`` times, each time with an answer from the pupil.

    ``forgets``: probability that the pupil forgets a carry or sign. ``slips``: probability that a digit is
    wrong.
    """
    rng = random.Random(SEED)
    for _ in range(copies):
        for record in data.records:
            terms = str(record.question).rpartition(":")[2].removesuffix("=").split()
            yield {
                "prompt": str(record.prompt),
                "completion": pupil(terms, rng, forgets, slips),
                "answer": record.answer or "",
            }


def pairs(data: Dataset) -> Iterator[dict[str, str]]:
    """Yield a preference pair for each question that the pupil got wrong: the right answer and the pupil's
    answer.
    """
    for lesson in lessons(data, 1, FORGETS, SLIPS):
        if lesson["completion"] != lesson["answer"]:
            yield {
                "prompt": lesson["prompt"],
                "chosen": lesson["answer"],
                "rejected": lesson["completion"],
                "answer": lesson["answer"],
            }


def pupil(terms: list[str], rng: random.Random, forgets: float, slips: float) -> str:
    """Return the pupil's answer to ``a + b`` or ``a - b``.

    ``terms``: the three words of the expression. ``forgets`` and ``slips``: as in `lessons`.
    """
    first, sign, second = int(terms[0]), terms[1], int(terms[2])
    low, high = sorted((first, second))
    carries = first % 10 + second % 10 >= 10 if sign == "+" else high % 10 < low % 10
    size = first + second if sign == "+" else high - low
    negative = sign == "-" and first < second
    if carries and rng.random() < forgets:
        size += -10 if sign == "+" else 10
    if negative and rng.random() < forgets:
        negative = False
    digits = list(str(size))
    if rng.random() < slips:
        place = rng.randrange(len(digits))
        digits[place] = rng.choice([digit for digit in "0123456789" if digit != digits[place]])
    return "-" * negative + "".join(digits)


def blank(folder: Path, texts: Iterable[Any]) -> None:
    """Save an untrained model with about 0.95M parameters, and its tokenizer, to ``folder``.

    The tokenizer is trained on ``texts``. It is byte-level and has a token for each digit.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(texts)
    vocabulary = -(-len(tokenizer) // 16) * 16
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        initializer_range=0.06,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(SEED)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(texts: Iterable[Any]) -> Any:
    """Return a byte-level BPE tokenizer trained on ``texts``.

    It encodes and decodes any text without loss. Each word of the questions is a single token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=["<pad>", "<eos>"], show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def _trained(model: Path, data: Path, steps: int, out: Path, **optimizer: Any) -> Path:
    """Train a model for ``steps`` steps of `sft`, with 32 rows each, and return the trained model's
    folder.
    """
    actor = {"beta2": 0.95, "weight_decay": 0.01, **optimizer}
    result = run(
        "sft",
        model=str(model),
        data=str(data),
        iterations=steps,
        prompts=32,
        held_out=0,
        seed=SEED,
        out=str(out),
        actor=actor,
        quiet=False,
    )
    return result.folder / "final" / "actor"


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
