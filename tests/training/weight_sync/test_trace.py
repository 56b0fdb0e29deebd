"""Destinations from an engine's own loader, whatever the loader does with a tensor."""

import random
import string

import pytest
import torch
from strategies import bits_of, part
from torch import Tensor, nn

from rlflow.errors import PlanError
from rlflow.training.weight_sync.kinds import replicated
from rlflow.training.weight_sync.proof import destinations, prove
from rlflow.training.weight_sync.trace import Traced, trace

SHAPES = {
    "embed.weight": (10, 6),
    "q.weight": (8, 6),
    "k.weight": (4, 6),
    "v.weight": (4, 6),
    "q.bias": (8,),
    "conv.weight": (6, 9),
    "heads.weight": (12, 5),
    "scale": (1,),
    "norm.weight": (6,),
    "down.weight": (6, 8),
    "experts.weight": (3, 4, 5),
}
TENSORS = replicated(SHAPES, "float32", 1).tensors


class Module(nn.Module):
    def __init__(self, *shapes: tuple[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes:
            self.register_parameter(
                name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
            )


class Engine(nn.Module):
    """Rank ``rank`` of 2 with typical engine operations: fusing, transposing, padding, tying, repeating,
    reordering heads.
    """

    def __init__(self, rank: int, renamed: dict[str, str] | None = None) -> None:
        super().__init__()
        self.rank, self.renamed = rank, renamed or {name: name for name in SHAPES}
        self.embed = Module(("weight", (6, 6)))  # five rows and one of padding
        self.lm_head = Module()
        self.lm_head.weight = self.embed.weight
        self.qkv = Module(("weight", (12, 6)), ("bias", (4,)))
        self.conv, self.heads = Module(("weight", (9, 3))), Module(("weight", (12, 5)))
        self.norm, self.twice, self.down = (
            Module(("weight", (6,))),
            Module(("weight", (2, 6))),
            Module(("weight", (6, 4))),
        )
        self.scale, self.experts = Module(("weight", (1,))), Module(("weight", (3, 5, 4)))

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.take({theirs: ours for ours, theirs in self.renamed.items()}[name], tensor)

    def take(self, name: str, t: Tensor) -> None:
        r = self.rank
        if name == "embed.weight":
            self.embed.weight.data[:5].copy_(t[5 * r : 5 * r + 5])
            self.embed.weight.data[5:].fill_(0)
        elif name == "q.weight":
            self.qkv.weight.data.narrow(0, 0, 4).copy_(t.chunk(2)[r])
        elif name in ("k.weight", "v.weight"):
            self.qkv.weight.data.narrow(0, 4 if name[0] == "k" else 8, 4).copy_(t)  # one head, on both ranks
        elif name == "q.bias":
            self.qkv.bias.data.copy_(t[4 * r : 4 * r + 4])
        elif name == "conv.weight":
            self.conv.weight.data.copy_(t.t()[:, 3 * r : 3 * r + 3])
        elif name == "heads.weight":  # 2 x 3 x 2 rows, the first two axes swapped
            self.heads.weight.data.copy_(
                t.view(2, 3, 2, 5).transpose(0, 1).reshape(12, 5) if t.device.type != "meta" else t
            )
        elif name == "scale":
            self.scale.weight.data.copy_(t)
        elif name == "norm.weight":
            self.norm.weight.data.copy_(t)
            self.twice.weight.data.copy_(t)
        elif name == "experts.weight":
            self.experts.weight.data.copy_(t.transpose(1, 2))
        else:
            self.down.weight.data.copy_(t[:, 4 * r : 4 * r + 4])


class Split(Engine):
    """An engine that copies a tensor through views of more dimensions."""

    def take(self, name: str, t: Tensor) -> None:
        if name == "heads.weight":
            self.heads.weight.data.view(3, 2, 2, 5).copy_(t.view(2, 3, 2, 5).transpose(0, 1))
        else:
            super().take(name, t)


def written(engine: nn.Module, traced: Traced, values: dict[str, Tensor]) -> None:
    for name, pieces in traced.pieces.items():
        for piece in pieces.pieces:
            piece.view.copy_(part(values[name], piece.box))


def state(engine: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.state_dict().items()}


def values(seed: int) -> dict[str, Tensor]:
    return {name: bits_of(shape, "float32", seed + i) for i, (name, shape) in enumerate(SHAPES.items())}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_trace_has_the_effect_of_the_loader(rank, shuffled):
    names = {
        name: "".join(random.Random(i).sample(string.ascii_lowercase, 9)) if shuffled else name
        for i, name in enumerate(SHAPES)
    }
    engine, other = Split(rank, names), Split(rank, names)
    given = {names[name]: tensor for name, tensor in values(0).items()}
    tensors = {names[name]: spread for name, spread in TENSORS.items()}
    before = state(engine)
    traced = trace(engine, tensors)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())
    assert traced.failed == traced.fallback == {}
    other.load_weights(given.items())
    written(engine, traced, given)
    assert all(torch.equal(tensor, state(engine)[name]) for name, tensor in other.state_dict().items())
    assert set(traced.modules[names["norm.weight"]]) == {"norm", "twice"}


def test_an_unreached_parameter_is_an_error_with_its_name():
    tensors = {name: spread for name, spread in TENSORS.items() if name != "down.weight"}
    with pytest.raises(
        PlanError, match=r"the engine's parameter 'down\.weight' gets no weight of the trainer"
    ):
        trace(Split(0), tensors)


class Tied(Split):
    """An engine that also loads a tied head; the last name wins."""

    def take(self, name: str, t: Tensor) -> None:
        super().take("embed.weight" if name == "lm_head.weight" else name, t)


def test_a_tied_tensor_has_its_last_name():
    tensors = {**TENSORS, "lm_head.weight": TENSORS["embed.weight"]}
    engine = Tied(1, {name: name for name in tensors})
    traced = trace(engine, tensors)
    assert traced.ties == {"embed.weight": "lm_head.weight"}
    assert "embed.weight" not in traced.pieces

    def first_wins(weights):
        engine.load_weights(sorted(weights, key=lambda item: item[0] == "embed.weight"))

    assert prove(engine, traced, tensors, first_wins).why == {}


class Odd(Split):
    """An engine whose loader reads a number, computes, keeps its own buffer, and derives a tensor without a
    copy.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.norm.register_buffer("plus_one", torch.zeros(6, dtype=torch.bfloat16))

    def take(self, name: str, t: Tensor) -> None:
        if name == "scale":
            self.scale.weight.data.fill_(t.item())
        elif name == "down.weight":
            self.down.weight.data.copy_(t[:, 4 * self.rank : 4 * self.rank + 4] * 2)
        else:
            super().take(name, t)
            if name == "norm.weight" and t.device.type != "meta":
                self.norm.plus_one.copy_(t + 1)


def test_untraceable_modules_are_left_to_the_engine():
    engine, other = Odd(1), Odd(1)
    traced = trace(engine, TENSORS)
    assert set(traced.failed) == {"scale", "down.weight"}
    assert "item" in traced.failed["scale"]
    assert traced.failed["down.weight"] == "the loader computes with it"
    assert set(traced.fallback) == {"scale", "down"}
    assert set(destinations(traced, TENSORS).staged) == {"scale", "down.weight"}
    made = prove(engine, traced, TENSORS, engine.load_weights)
    assert made.why["norm"] == "norm.plus_one differs from the engine's own reload"
    assert set(made.staged) == {"scale", "down.weight", "norm.weight"}
    given = values(7)
    for name, pieces in made.pieces.items():
        for piece in pieces.pieces:
            piece.view.copy_(part(given[name], piece.box))
    made.finish(engine.load_weights)
    other.load_weights(given.items())
    assert all(torch.equal(tensor, state(engine)[name]) for name, tensor in other.state_dict().items())


class Forgetful(Split):
    """An engine whose loader behaves differently without memory, for example because it checks the device."""

    def take(self, name: str, t: Tensor) -> None:
        if name == "k.weight" and t.device.type == "meta":
            return
        if name == "conv.weight" and t.device.type == "meta":
            t = t.view(6, 9).flip(0)
        super().take(name, t)


def test_the_check_finds_errors_of_the_trace():
    engine = Forgetful(0)
    traced = trace(engine, TENSORS)
    assert traced.failed == {"conv.weight": "the loader computes with it"}
    made = prove(engine, traced, TENSORS, engine.load_weights)
    assert "qkv" in made.why
    assert {"q.weight", "v.weight", "q.bias"} <= set(made.staged)
