"""The vllm Generator: samples with vLLM 0.32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig

from rlflow.backends.local.endings import eos_of, text_stops
from rlflow.backends.local.tokenizer import load_tokenizer
from rlflow.backends.vllm.columns import batch_of, pieces_of, token_column
from rlflow.backends.vllm.engine import CPU_CACHE, Engine
from rlflow.backends.vllm.settings import GeneratorSettings
from rlflow.batch import Batch
from rlflow.reshard.layout import Spread
from rlflow.reshard.proof import Destinations, prove
from rlflow.reshard.trace import trace
from rlflow.training.protocols import ModelSpec, Sampling

TAGS = {"weights": "weights", "cache": "kv_cache"}  # what vLLM calls them
COLDEST = 0.01  # vLLM samples no colder than that, and would take it in place of what was asked for


class Generator:
    """Samples responses; whoever trains the model sends its weights with ``receive``.

    With ``tensor_parallel`` above 1 that many adjacent ranks share an engine and are called with the same rows. Other ranks of the pool
    have engines that know nothing of this one: they may sample when it does not.
    """

    Settings = GeneratorSettings
    collective = False

    def __init__(self, spec: ModelSpec, settings: GeneratorSettings | None = None) -> None:
        self.spec, self.settings = spec, settings or GeneratorSettings()
        assert spec.folder is not None
        self.tokenizer = load_tokenizer(spec.folder)
        self.asleep: set[str] = set()
        generation, config = _configs(spec.folder)
        self.engine = Engine(spec, self.settings, config.architectures or ())
        self.eos = eos_of((generation, config, config.get_text_config()), self.engine.vocabulary, self.tokenizer)

    @staticmethod
    def cache_bytes(settings: GeneratorSettings, device: str) -> int:
        """Of the key-value cache, which is there from the start; 0 where that is what is left of a GPU."""
        return settings.kv_cache_memory_bytes or (CPU_CACHE if device == "cpu" else 0)

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model as vLLM has it, alive."""
        return self.engine.module

    def generate(self, prompts: Batch, sampling: Sampling, seeds: Sequence[int]) -> Batch:
        """Sample ``sampling.samples`` responses to each prompt; ``seeds`` has one number per row.

        Gives tokens, mask, completion, finish, sampled_logprobs, temperature, policy_version and group over
        ``prompts.axis.repeat(samples)``, without the prompts' own columns. A row's tokens are a function of its prompt, its seed and the
        weights; other rows have a say only through the rounding of matrix products. ``policy_version`` tells tokens apart that were sampled
        before and after a ``receive`` from another thread. Raises ValueError where a row does not fit, and whatever ends the engine.
        """
        axis = prompts.axis.repeat(sampling.samples)
        pieces = pieces_of(prompts, "prompt_tokens")
        self._check(pieces, sampling, len(axis), len(seeds))
        pieces = [piece for piece in pieces for _ in range(sampling.samples)]
        self._check_peers((pieces, sampling, list(seeds)))
        stops = text_stops(sampling.stop, self.tokenizer)
        drawn = dict(self.engine.sample(pieces, sampling, seeds, self.eos, stops))
        return batch_of(axis, [drawn[number] for number in range(len(axis))], sampling, self.eos, self.tokenizer)

    def logprobs(self, batch: Batch) -> Batch:
        """`logprobs` of ``tokens`` after ``prompt_tokens`` at temperature 1, with the weights that are sampled with."""
        prompts, tokens = pieces_of(batch, "prompt_tokens"), pieces_of(batch, "tokens")
        whole = [prompt + row for prompt, row in zip(prompts, tokens, strict=True)]
        self._check(whole, Sampling(max_tokens=1), len(batch), len(batch))
        self._check_peers(whole)
        scored = self.engine.score(whole)
        return Batch(batch.axis, {"logprobs": token_column([row[len(row) - len(own) :] for row, own in zip(scored, tokens, strict=True)])})

    def _check_peers(self, call: Any) -> None:
        """Ranks that share an engine make every step of it together: were their rows different, they would wait for each other forever."""
        if any(other != call for other in self.engine.seat.gathered(call)):
            raise ValueError(f"generate: found different rows on ranks that share an engine, expected the same ones on each of "
                             f"{self.engine.seat.size} (tensor_parallel)")

    def _check(self, prompts: list[list[int]], sampling: Sampling, rows: int, seeds: int) -> None:
        if seeds != rows:
            raise ValueError(f"generate: found {seeds} seeds, expected one per row: {rows}")
        if not all(prompts):
            raise ValueError("prompt_tokens: found an empty prompt, expected at least one token (such as the tokenizer's BOS token)")
        if 0 < sampling.temperature < COLDEST:
            raise ValueError(f"temperature: found {sampling.temperature}, expected 0 or at least {COLDEST}, the lowest that vLLM knows")
        longest = max(map(len, prompts), default=0) + sampling.max_tokens
        if prompts and longest > self.engine.longest:
            raise ValueError(f"generate: found a prompt of {longest - sampling.max_tokens} tokens and max_tokens {sampling.max_tokens}, "
                             f"expected at most {self.engine.longest} together; kv_cache_memory_bytes or max_model_len may be in the way")

    def receive(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Take new weights by Hugging Face name, in place, each rank its part; ``version`` is the number of updates behind them. Another
        thread may call it while rows are sampled: they go on with the new weights and the keys and values of the old. Raises ValueError
        where a name is unknown or missing, or a shape does not fit."""
        with self.writing(version):
            self.load(weights)

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """The weights alone, by vLLM's own loader."""
        self.engine.load(weights)

    def destinations(self, tensors: Mapping[str, Spread]) -> Destinations:
        """Where in this rank's memory each of these tensors belongs, traced from vLLM's own loader and proved bit for bit. The weights are
        patterns afterwards: new ones have to be written before anything is sampled."""
        return prove(self.module, trace(self.module, tensors), tensors, self.load)

    def writing(self, version: int) -> AbstractContextManager[None]:
        """A time in which nothing is sampled, for who writes into the parameters of ``module``: afterwards these are the weights with
        ``version`` updates behind them."""
        return self.engine.writing(version)

    def healthy(self) -> bool:
        """Whether a token can be sampled: one is. Raises what keeps the engine from it."""
        return self.engine.answers()

    @staticmethod
    def movable(settings: GeneratorSettings, device: str) -> tuple[str, ...]:
        """What ``sleep`` frees: on a CPU nothing, because vLLM frees nothing there; on a GPU with ``sleep_mode``."""
        return tuple(TAGS) if settings.sleep_mode and device != "cpu" else ()

    def sleep(self, *parts: str, keep: bool = True) -> None:
        """Free the memory of these of ``movable``, or of all: of the weights, kept on the host or dropped where they will be received anew
        (vLLM's levels 1 and 2), and of the cache, which is lost."""
        movable = self.movable(self.settings, self.spec.device)
        self.asleep |= set(parts or movable) & set(movable)
        if "weights" in self.asleep:
            self.engine.llm.sleep(1 if keep else 2)  # takes the cache along
            self._wake(set(movable) - self.asleep)
        elif self.asleep:
            self.engine.llm.release_kv_cache_memory()

    def wake(self, *parts: str) -> None:
        """Take memory again, of the weights first where they are to be received before the cache is there. Dropped weights have to be
        received before anything is sampled."""
        names = self.asleep & set(parts or TAGS)
        self._wake(names)
        self.asleep -= names

    def _wake(self, parts: Iterable[str]) -> None:
        if tags := [TAGS[part] for part in sorted(parts)]:
            self.engine.llm.wake_up(tags)


def _configs(folder: Path) -> tuple[Any, Any]:
    """The generation config and the config of a model."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    own = (folder / "generation_config.json").is_file()
    generation = GenerationConfig.from_pretrained(folder, local_files_only=True) if own else GenerationConfig.from_model_config(config)
    return generation, config
