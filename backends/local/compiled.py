"""Compile a model's layers with torch.compile (Ansel et al. 2024), for ``--ROLE.compile true``.

Each layer is compiled separately, without its attention, because attention to packed rows isn't made of
tensor operations alone. The numbers of rows and tokens are symbolic, so one graph serves all sizes. But a
graph still depends on the sizes in its first call. Each graph is therefore first called with fixed sizes, so
that a resumed run has the same graphs as the interrupted one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rlflow.author import torch_private
from rlflow.author.batch import Batch
from rlflow.backends.local.network import Network
from rlflow.backends.local.packing import packed
from rlflow.backends.local.passes import hidden_states
from rlflow.backends.local.sequences import Sequences, sequences
from rlflow.backends.local.transformers_internals import ALL_ATTENTION_FUNCTIONS, GradientCheckpointingLayer
from rlflow.errors import PlanError

# maximum graphs of one function: one for each kind of layer, with and without gradient, of all models in the
# process
GRAPHS = 256
# Rows of the first call. Its sizes, 7 rows of 23 tokens, are unlikely to equal a size of the model.
FIRST = {"prompt_tokens": [[0] * 8] * 7, "tokens": [[0] * 15] * 7}
# A single row, for which torch makes another graph, with as many tokens as the rows above have when packed.
ALONE = {"prompt_tokens": [[0] * 8], "tokens": [[0] * 105]}


def check_compiler(device: str) -> None:
    """Raise PlanError if torch can't find a compiler for this type of device (cpu or cuda)."""
    reason = torch_private.missing_compiler(device)
    if reason:
        raise PlanError.of(
            "no-compiler",
            f"compile: layers on '{device}' cannot be compiled here",
            found=reason,
            expected="a C++ compiler such as g++" if device == "cpu" else "Triton",
            remedy="install it (on Debian: apt install g++), name it with CXX=PATH, or leave "
            "--ROLE.compile out"
            if device == "cpu"
            else "install the CUDA build of torch, or leave --ROLE.compile out",
        )


def compile_layers(network: Network, *, packs: bool) -> None:
    """Compile each layer of a model's backbone right away, including the backward pass if the model is
    trained.

    packs: True if rows are packed. The model's gradients are cleared. Raises PlanError if the model's layers
    are unknown or can't be compiled.
    """
    layers = [layer for layer in network.backbone.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise PlanError.of(
            "no-layers",
            f"compile: {type(network.module).__name__} has no layers of transformers' GradientCheckpointingLayer",
            found=type(network.backbone).__name__,
            expected="a decoder such as Llama, Qwen or Gemma",
            remedy="leave --ROLE.compile out",
        )
    _prepare()
    for layer in layers:
        layer.compile(dynamic=True)
    learning = list(network.parameters().values())
    with _compilable(network):
        for layout in _first(network, packs):
            _call(network, layout, learning)


@functools.cache
def _prepare() -> None:
    """Raise torch's limits on the number of graphs in this process, and exclude attention from
    compilation."""
    torch_private.limit_graphs(GRAPHS, GRAPHS * 4)
    plain: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = torch.compiler.disable(plain, reason="attention by blocks of rows")


def _first(network: Network, packs: bool) -> Iterator[Sequences]:
    yield (packed if packs else sequences)(Batch.of(**FIRST), network.device)
    if not packs:
        yield sequences(Batch.of(**ALONE), network.device)


def _call(network: Network, layout: Sequences, learning: list[nn.Parameter]) -> None:
    """Run a forward pass without gradients. If there are ``learning`` parameters, also run a pass with
    gradients, then clear these."""
    with torch.no_grad():
        hidden_states(network, layout)
    if learning:
        hidden_states(network, layout).float().mean().backward()
        for parameter in learning:
            parameter.grad = None


@contextlib.contextmanager
def _compilable(network: Network) -> Iterator[None]:
    """Turn errors from torch's compilers and g++ into PlanErrors inside a ``with`` block."""
    try:
        yield
    except torch_private.compile_errors() as error:
        raise PlanError.of(
            "compile",
            f"compile: layers of {type(network.module).__name__} do not compile",
            found=str(error).strip().partition("\n")[0] or type(error).__name__,
            expected="layers that torch.compile accepts",
            remedy="leave --ROLE.compile out; on a CPU, also check that Python's headers are installed",
        ) from error
