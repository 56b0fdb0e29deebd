"""Train a model to search: GRPO with `--env search`, on questions that need two searches.

    python benchmarks/search.py [--seeds 0 1 2] [--iterations 40] [--lessons 2000] [--out FOLDER]

The corpus has 4,096 passages on invented names, such as "bado kimu : friend tola gisu ." and "tola gisu :
room 47 .". The question "room of friend of bado kimu ?" needs the friend's passage and then the room's
passage. 512 of the 2,048 questions are held out; each has its own passages. The model has three layers, 0.4M
parameters and a token for each word. It learns the format with `rlflow run sft` from a simulated pupil, who
searches and answers badly in another corpus. Before `rlflow run grpo`, it has seen none of the passages.
During that run, it sees them only by searching.

The table shows four held-out accuracies: trained without a tool; with the tool before training; with the tool
after training; and trained with the two right passages in the prompt. All three trainings are `rlflow run
grpo` with the same model and settings.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.rewards.environments.shipped.search import Search

# number of questions of the corpus, of held-out questions among them, and of questions of the pupil's corpus
QUESTIONS, HELD_OUT, LESSONS = 2048, 512, 4096
TOPK = 2  # passages that a search returns
NUMBERS = [str(number) for number in range(10, 100)]
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aiou"]
MARKS = ["<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>"]
WORDS = [":", ".", "?", "of", "friend", "room", "nothing", "was", "found"]
TOOL = ["--env", "search", "--env.topk", str(TOPK), "--env.turns", "4", "--hp.max_tokens", "72"]
SHARED = [
    "--held-out",
    str(HELD_OUT),
    "--eval-every",
    "0",
    "--prompts",
    "64",
    "--hp.samples",
    "8",
    "--actor.lr",
    "5e-4",
    "--actor.generate.stop",
    "</answer>",
]  # flags of all three trainings
HIDDEN, LAYERS = 96, 3


@dataclass(frozen=True)
class Chain:
    """A question with two steps: the room of the friend of a name."""

    name: str
    friend: str
    room: str

    @property
    def question(self) -> str:
        return f"room of friend of {self.name} ?"

    @property
    def passages(self) -> tuple[str, str]:
        """The two passages that the answer needs: the friend's, then the room's."""
        return f"{self.name} : friend {self.friend} .", f"{self.friend} : room {self.room} ."


# -- the questions
# ------------------------------------------------------------------------------------------------------------


def names(rng: random.Random) -> list[str]:
    """Return all names, shuffled. A name has two words.

    Each word is always the first or always the second of a name, and occurs in 160 names.
    """
    words = rng.sample(
        [first + second for first in SYLLABLES for second in SYLLABLES if first != second], 320
    )
    pairs = [f"{first} {second}" for first in words[:160] for second in words[160:]]
    rng.shuffle(pairs)
    return pairs


def chains(rng: random.Random) -> tuple[list[Chain], list[Chain]]:
    """Return (questions, questions of the pupil). Every name occurs in only one question."""
    pool = iter(names(rng))
    every = [Chain(next(pool), next(pool), rng.choice(NUMBERS)) for _ in range(QUESTIONS + LESSONS)]
    return every[:QUESTIONS], every[QUESTIONS:]


def shown(chain: Chain, rng: random.Random) -> str:
    """Return the question with its two right passages, in random order, as a prompt."""
    return f"{chain.question} <information> {' '.join(rng.sample(chain.passages, 2))} </information>"


def write_corpus(path: Path, of: Iterable[Chain], rng: random.Random) -> Path:
    """Write the passages of questions to a corpus file for `--env search`, shuffled."""
    passages = [{"text": passage} for chain in of for passage in chain.passages]
    rng.shuffle(passages)
    return write(path, passages)


def write(path: Path, records: Iterable[dict[str, str]]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


# -- the pupil
# ------------------------------------------------------------------------------------------------------------


def lesson(chain: Chain, corpus: Path, others: list[Chain], rng: random.Random) -> dict[str, str]:
    """Return a lesson: a question with the pupil's searches and answer.

    The pupil answers one-step questions correctly, and most two-step questions wrongly. ``corpus``: the file
    that the pupil searches. ``others``: questions from which wrong names are drawn.
    """
    kind = rng.random()
    if kind < 0.25:
        return one_step(f"room of {chain.friend} ?", chain.friend, chain.room, corpus)
    if kind < 0.5:
        return one_step(f"friend of {chain.name} ?", chain.name, chain.friend, corpus)
    if kind < 0.6:
        return {
            "prompt": shown(chain, rng),
            "completion": answered(chain.room if rng.random() < 0.5 else rng.choice(NUMBERS)),
        }
    return two_steps(chain, corpus, others, rng)


def one_step(question: str, name: str, answer: str, corpus: Path) -> dict[str, str]:
    """Return a one-step question with a correct search and answer."""
    action = f"<search> {name} </search>"
    return {
        "prompt": question,
        "completion": f"{action}{Search(corpus=corpus, topk=TOPK).step(action).says}{answered(answer)}",
    }


def two_steps(chain: Chain, corpus: Path, others: list[Chain], rng: random.Random) -> dict[str, str]:
    """Return a two-step question with the pupil's searches and answer.

    The pupil may guess at once, search for a wrong name, guess after one search, repeat a search, or ignore
    the passage that it found.
    """
    episode, text, information = Search(corpus=corpus, topk=TOPK), "", ""
    while episode.searches < 2 and rng.random() < (0.4 if text else 0.9):
        follows = chain.friend if text and rng.random() < 0.6 else chain.name
        query = follows if rng.random() < 0.8 else rng.choice(others).name
        action = f"<search> {query} </search>"
        information = episode.step(action).says
        text += f"{action}{information}"
    right = chain.passages[1] in information and rng.random() < 0.7
    return {
        "prompt": chain.question,
        "completion": text + answered(chain.room if right else rng.choice(NUMBERS)),
    }


def answered(number: str) -> str:
    """Return the text that gives an answer."""
    return f"<answer> {number} </answer>"


# -- the model
# ------------------------------------------------------------------------------------------------------------


def blank(folder: Path, words: Iterable[str], seed: int) -> Path:
    """Save an untrained model, and a tokenizer with a token for each word."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {
        word: number
        for number, word in enumerate(["<pad>", "<eos>", "<unk>", *MARKS, *WORDS, *NUMBERS, *words])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tags = pre_tokenizers.Split(Regex("</?[a-z]+>"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tags, pre_tokenizers.WhitespaceSplit()])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocabulary),
            hidden_size=HIDDEN,
            intermediate_size=3 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=HIDDEN // 4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            attention_dropout=0.0,
            initializer_range=0.06,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    ).save_pretrained(folder)
    return folder


# -- the runs
# ------------------------------------------------------------------------------------------------------------


def run(algorithm: str, model: Path, data: Path, seed: int, out: Path, *flags: str) -> dict[str, Any]:
    """Run rlflow in a separate process, and return the JSON on the last line of its output."""
    words = [
        sys.executable,
        "-m",
        "rlflow.cli.main",
        "run",
        algorithm,
        "--model",
        str(model),
        "--data",
        str(data),
        "--seed",
        str(seed),
    ]
    words += [
        "--out",
        str(out),
        "--threads",
        "2",
        "--save-every",
        "0",
        "--json",
        "--quiet",
        "--actor.beta2",
        "0.95",
        *flags,
    ]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compared(seed: int, folder: Path, lessons: int, iterations: int) -> list[str]:
    """Run all trainings with one seed, and return the seed's row of the table."""
    start, rng = time.monotonic(), random.Random(seed)
    corpus_chains, pupil_chains = chains(rng)
    corpus = write_corpus(folder / "corpus.jsonl", corpus_chains, rng)
    pupils = write_corpus(folder / "pupil.jsonl", pupil_chains, rng)
    lesson_rows = [lesson(chain, pupils, pupil_chains, rng) for chain in pupil_chains * 3]
    data = write(folder / "lessons.jsonl", lesson_rows)
    plain = write(
        folder / "questions.jsonl",
        ({"prompt": chain.question, "answer": chain.room} for chain in corpus_chains),
    )
    given = write(
        folder / "given.jsonl",
        ({"prompt": shown(chain, rng), "answer": chain.room} for chain in corpus_chains),
    )
    model = blank(folder / "blank", words_of([*corpus_chains, *pupil_chains]), seed)
    sft = run(
        "sft",
        model,
        data,
        seed,
        folder,
        "--held-out",
        "0",
        "--prompts",
        "64",
        "--iterations",
        str(lessons),
        "--actor.lr",
        "2e-3",
        "--actor.schedule",
        "linear",
        "--actor.warmup",
        "50",
    )
    model = Path(sft["run"]) / "final" / "actor"
    flags = [*SHARED, "--iterations", str(iterations)]
    without = run("grpo", model, plain, seed, folder, *flags, "--hp.max_tokens", "8")
    tool = run(
        "grpo",
        model,
        plain,
        seed,
        folder,
        *flags,
        *TOOL,
        "--env.corpus",
        str(corpus),
        "--actor.generate.stop",
        "</search>",
    )
    right = run("grpo", model, given, seed, folder, *flags, "--hp.max_tokens", "8")
    shares = without["greedy_after"], tool["greedy_before"], tool["greedy_after"], right["greedy_after"]
    return [str(seed), *(f"{share:.1%}" for share in shares), f"{time.monotonic() - start:.0f}"]


def words_of(every: Iterable[Chain]) -> list[str]:
    """Return the words of all names, sorted."""
    return sorted({word for chain in every for name in (chain.name, chain.friend) for word in name.split()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=40, help="iterations of each GRPO training")
    parser.add_argument("--lessons", type=int, default=2000, help="steps of sft, with 64 lessons each")
    parser.add_argument("--out", type=Path, help="keep the runs in this folder")
    options = parser.parse_args()
    print(
        "| seed | no tool, trained | search, untrained | search, trained | right passages, trained | "
        "seconds |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(options.out or scratch) / f"seed{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            print(
                f"| {' | '.join(compared(seed, folder, options.lessons, options.iterations))} |", flush=True
            )


if __name__ == "__main__":
    main()
