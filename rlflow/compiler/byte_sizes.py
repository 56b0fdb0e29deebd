"""How much memory a model needs on each rank, based on config.json and the headers of safetensors files.

Weights aren't read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

FLOAT = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
# matrices whose names contain one of these strings get no adapter
NO_LINEAR = ("embed", "wte", "wpe", "lm_head", "score", "norm")
GROWTH = 1.5  # buffers of a key-value cache can be up to 1.5 times as large as their content
ALIASES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}


@dataclass(frozen=True)
class MemoryItem:
    """How many bytes of one kind of memory a trainer or generator needs on each rank of a pool."""

    pool: str
    role: str
    half: str  # the side: trainer, generator, or reward
    what: str  # the kind of memory, such as weights or optimizer
    bytes: int | None  # None if the files of the model folder do not determine it


@dataclass(frozen=True)
class ModelFacts:
    """A model's configuration and the shapes of its weights, as found in its folder."""

    config: Mapping[str, Any]  # configuration of the text model, if the folder has several
    shapes: Mapping[str, tuple[int, ...]]  # weight → shape; tied weights count once

    @staticmethod
    def of(folder: Path) -> ModelFacts:
        """Read the configuration and the safetensors headers from a model folder.

        Raises OSError or ValueError if that fails.
        """
        config = json.loads((folder / "config.json").read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError("config.json is not a JSON object")
        shapes = dict(_shapes(folder))
        if config.get("tie_word_embeddings", True) and len(shapes) > 1:
            shapes.pop("lm_head.weight", None)
        text = config.get("text_config")
        return ModelFacts(text if isinstance(text, dict) and text else config, shapes)

    @cached_property
    def parameters(self) -> int | None:
        """The number of parameters, or None if there are no safetensors files."""
        return sum(map(prod, self.shapes.values())) or None

    @property
    def hidden(self) -> int:
        """The width of the hidden states, or 0 if the configuration doesn't say."""
        return int(self._number("hidden_size") or 0)

    @property
    def unused_head(self) -> int:
        """The number of parameters in the language-model head, or 0 if it is tied to the embeddings.

        These are unused in a model with a different head.
        """
        return prod(self.shapes.get("lm_head.weight", (0,)))

    def adapters(self, rank: int, attention: bool) -> int:
        """Count the parameters of LoRA adapters of the given rank.

        If ``attention``, only attention layers have adapters; otherwise, all linear layers do.
        """
        return sum(rank * sum(shape) for shape in self._adapted(attention))

    def merged(self, attention: bool) -> int:
        """Count the parameters of the layers that adapters are added to.

        If ``attention``, that's only attention layers; otherwise, all linear layers.
        """
        return sum(map(prod, self._adapted(attention)))

    def _adapted(self, attention: bool) -> Iterator[tuple[int, ...]]:
        return (
            shape
            for name, shape in self.shapes.items()
            if len(shape) == 2
            and not any(part in name for part in NO_LINEAR)
            and ("att" in name or not attention)
        )

    @property
    def cache_numbers(self) -> int | None:
        """The number of cached key and value entries per token, or None if the configuration doesn't say."""
        layers, heads, hidden = (
            self._number(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        if not (layers and heads and hidden):
            return None
        return (
            2
            * layers
            * (self._number("num_key_value_heads") or heads)
            * (self._number("head_dim") or hidden // heads)
        )

    def _number(self, name: str) -> int | None:
        value = self.config.get(name, self.config.get(ALIASES.get(name, name)))
        return value if isinstance(value, int) else None


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        if file.name != "value_head.safetensors":
            with safe_open(file, framework="numpy") as opened:
                yield from ((name, tuple(opened.get_slice(name).get_shape())) for name in opened.keys())  # noqa: SIM118


@dataclass(frozen=True)
class ModelFootprint:
    """The memory that a role's trainer and generator need for a model, on each of their ranks."""

    facts: ModelFacts | None  # None: no folder, so sizes are unknown
    head: str = "logprobs"
    trained: bool = False
    dtype: str = "float32"  # dtype of the arithmetic
    lora: int = 0  # rank of adapters; 0: none
    attention: bool = False  # True: only attention layers have adapters
    batch_tokens: int = 0  # tokens of the generator's cache; 0: not known
    shares: int = 1  # ranks that share the parts in ``divided`` of the trainer
    divided: tuple[str, ...] = ()
    sampler_shares: int = 1  # ranks that share the generator's weights
    cache_bytes: int = 0  # bytes of the generator's cache, if a setting fixes them; else 0
    copied: bool = False  # True: the optimizer has its own float32 copy of the trained weights
    flat: bool = False  # True: the trainer divides flattened tensors
    tensor: int = 1  # ranks that split the trainer's tensors for tensor parallelism, before they are divided
    follows: bool = False  # True: its weights follow another model's
    arriving: bool = False  # True: the weights that it follows come from another pool
    writable_copy: bool = False  # True: the generator samples with the trainer's weights

    @property
    def weight_bytes(self) -> int | None:
        """The size of a trainer's weights without adapters, in bytes, or None if unknown.

        bfloat16 weights count as float32 if they are trained directly rather than through adapters, or follow
        others.
        """
        master = (self.follows or (self.trained and not self.lora)) and self.dtype == "bfloat16"
        return None if self._weights is None else self._weights * (4 if master else FLOAT[self.dtype])

    @property
    def _weights(self) -> int | None:
        """The number of parameters in the role's model, or None if unknown.

        A model that returns scores has a score head instead of the language-model head.
        """
        if self.facts is None or self.facts.parameters is None:
            return None
        return self.facts.parameters + (
            self._new_head - self.facts.unused_head if self.head == "scores" else 0
        )

    @property
    def _new_head(self) -> int:
        """The number of parameters in a head that isn't in the folder, or else 0. Value heads have a bias."""
        assert self.facts is not None
        there = self.head == "logprobs" or any(name.endswith("score.weight") for name in self.facts.shapes)
        return 0 if there else self.facts.hidden + (self.head == "values")

    @property
    def learning_bytes(self) -> int | None:
        """The size of all trained weights in bytes, or None if unknown.

        The gradient and each moment of AdamW have the same size.
        """
        if self.facts is None or self._weights is None:
            return None
        if self.lora:
            numbers = self.facts.adapters(self.lora, self.attention) + self._new_head
        elif self.head == "values":
            numbers = self._weights - self.facts.unused_head + self._new_head
        else:
            numbers = self._weights
        return numbers * max(FLOAT[self.dtype], 4)

    @property
    def commit_bytes(self) -> int | None:
        """The size in bytes of an in-memory checkpoint of what an iteration may change, or None if unknown.

        The checkpoint holds the weights, AdamW's moments, and adapters or a value head. Layers with adapters
        count as at least float32.
        """
        learning = self.learning_bytes
        if self.facts is None or learning is None or self.weight_bytes is None:
            return None
        head = self._new_head * max(FLOAT[self.dtype], 4) if self.head == "values" else 0
        wider = (
            self.facts.merged(self.attention) * (max(FLOAT[self.dtype], 4) - FLOAT[self.dtype])
            if self.lora
            else 0
        )
        return (
            self.weight_bytes
            + wider
            + (learning if self.lora else head)
            + (2 * learning if self.trained else 0)
        )

    def trainer(self) -> dict[str, int | None]:
        """Return a trainer's memory on each rank: kind → bytes, with None if unknown.

        The dict is empty if there is no model folder.
        """
        if self.facts is None:
            return {}
        sizes: dict[str, int | None] = {"weights": self.weight_bytes}
        if self.arriving:
            arriving = self._share(self.weight_bytes) if "weights" in self.divided else self.weight_bytes
            sizes["arriving weights"] = arriving
        if self.trained:
            learning = self.learning_bytes
            sizes |= {"adapters": learning} if self.lora else {}
            sizes |= {
                "gradient": learning,
                "optimizer": None if learning is None else (2 + self.copied) * learning,
            }
        return {name: self._share(size) if name in self.divided else size for name, size in sizes.items()}

    def _share(self, size: int | None) -> int | None:
        return None if size is None else -(-size // self.shares)

    def generator(self) -> dict[str, int | None]:
        """Return a generator's memory on each rank, for its weights and its largest cache.

        This is a dict of kind → bytes, with None if unknown, and is empty if there is no model folder. A
        generator that samples with the trainer's weights has no weights of its own.
        """
        if self.facts is None:
            return {}
        weights = (
            None if self._weights is None else -(-self._weights * FLOAT[self.dtype] // self.sampler_shares)
        )
        sizes: dict[str, int | None] = {} if self.writable_copy else {"weights": weights}
        if self.cache_bytes:
            return sizes | {"cache": self.cache_bytes}
        numbers = self.facts.cache_numbers
        cache = (
            int(numbers * self.batch_tokens * GROWTH) * FLOAT[self.dtype]
            if numbers and self.batch_tokens
            else None
        )
        return sizes | {"cache, at most": cache}
