"""One rank of several that train with the DeepSpeed backend, and compare with the local one on all rows: RANK RANKS MODELS OUT.

The first rank writes what it measured to OUT/RANKS.json, and a state of stage 3 to OUT/RANKS.safetensors.
"""

import gc
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlflow import loss
from rlflow.backends import deepspeed, local
from rlflow.backends.deepspeed.partitions import flats
from rlflow.batch import Batch
from rlflow.training.learning import Share
from rlflow.training.objective import Totals
from rlflow.training.peers import Peers
from rlflow.training.protocols import ModelSpec
from rlflow.training.rows import mask_counts

torch.set_num_threads(1)
RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
MODELS, OUT = Path(sys.argv[3]), Path(sys.argv[4])
STAGES = (1, 2, 3)
SETTINGS = {"lr": 5e-4, "weight_decay": 0.1, "max_grad_norm": 0.5, "micro_tokens": 16}
STEPS = [[[0], [1, 2, 3, 4]], [[5, 6], []], [[7], [8, 9]]]  # rows of each step, by rank: uneven, and none on one
AGAIN = [[[9, 8], [0, 3]]]
chance = torch.Generator().manual_seed(0)
LENGTHS = torch.randint(2, 12, (10,), generator=chance).tolist()
BATCH = Batch.of(prompt_tokens=[[5, 6, 7]] * 10, tokens=[torch.randint(3, 60, (n,), generator=chance) for n in LENGTHS],
                 mask=[[True] * n for n in LENGTHS], scores=torch.randn(10, generator=chance), group=[i // 2 for i in range(10)])


@loss
def weighted(new, scores, mask):
    return -new.logprobs * scores[:, None], {}


@loss
def breaking(new, scores, mask):
    return -new.logprobs * (scores[:, None] * 1000).exp(), {}  # infinite where a score is above 0.09, though the column is finite


@loss(new="values")
def regression(new, mask):
    return (new.values - 1).square(), {}


@loss(new="scores", rows="group")
def ranking(new, mask):
    return -torch.nn.functional.logsigmoid(new.scores[0::2] - new.scores[1::2]).repeat_interleave(2), {}


OBJECTIVES = {"logprobs": (weighted, "tokens"), "values": (regression, "tokens"), "scores": (ranking, "rows")}


def join():
    """The group of all ranks, and one of this rank alone, for the local trainers."""
    if RANKS == 1:
        return None
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(OUT / "meeting"), RANKS), rank=RANK, world_size=RANKS,
                            timeout=timedelta(seconds=120))
    return [dist.new_group([rank]) for rank in range(RANKS)][RANK]


def made(shape, zero=None, head="logprobs", trained=True, dtype="float32", **more):
    """A DeepSpeed trainer of a stage; without one a local trainer that takes this rank for the only one."""
    module = deepspeed if zero else local
    stage = {"zero": zero} if zero else {}
    one = module.Trainer(ModelSpec(MODELS / shape, head, trained, dtype=dtype), module.Trainer.Settings(**SETTINGS | more | stage))
    if not zero:
        one.peers = Peers(ALONE)
    return one


def learned(one, steps=STEPS, head="logprobs", objective=None):
    """After the given steps: of a DeepSpeed trainer this rank's rows, of a local one all."""
    default, mean = OBJECTIVES[head]
    objective, counts, own, shares = objective or default, mask_counts(BATCH), [], []
    for step in steps:
        every = [row for rows in step for row in rows]
        mine = step[RANK] if RANKS > 1 and isinstance(one, deepspeed.Trainer) else every
        units = [torch.tensor([len(own) + i]) for i in range(len(mine))]
        if objective.rows == "group":
            units = [torch.cat(units[i : i + 2]) for i in range(0, len(units), 2)]
        shares.append(Share(units, Totals.of(counts[torch.tensor(every)])))
        own += mine
    return one, one.update_shares(BATCH.rows(own), objective, shares, mean, {}).steps


PAIRS = [[[0, 1], [2, 3, 4, 5]], [[6, 7], []], [[8, 9], [2, 3]]]  # the same with whole groups


def theta(state):
    return torch.cat([t.flatten().double() for name, t in state.items() if name.startswith(("parameters/", "adapters/"))])


def distance(one, other):
    """‖Δθ‖ / ‖θ‖, and whether the states have the same names in the same order."""
    a, b = one.state(), other.state()
    if not a:  # on other ranks than the first
        return 0.0, True
    return float((theta(a) - theta(b)).norm() / theta(b).norm()), list(a) == list(b)


def same(a, b):
    """Whether two states are equal in every bit, order of names included."""
    return list(a) == list(b) and all(torch.equal(a[name].cpu(), b[name].cpu()) and a[name].dtype == b[name].dtype for name in a)


def copied(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def everywhere(state):
    """The first rank's on all."""
    found = [state]
    if RANKS > 1:
        dist.broadcast_object_list(found, 0)
    return found[0]


def share(one):
    """The part of all weights' elements that this rank holds between calls."""
    parameters = list(one.network.module.parameters())
    held = sum(p.ds_tensor.numel() + p.data.numel() for p in parameters)
    return held / sum(p.ds_numel for p in parameters)


def equality(shape, zero):
    one, other = made(shape, zero), made(shape)
    rows = list(range(10)) if RANKS == 1 else [[4, 2, 7], []][RANK]
    same_forward = torch.equal(one.forward(BATCH.rows(rows))["logprobs"], other.forward(BATCH.rows(rows))["logprobs"])
    begun = share(one) if zero == 3 else None
    (_, steps), (_, expected) = learned(one), learned(other)
    apart, names = distance(one, other)
    return {"apart": apart, "names": names, "forward": same_forward, "norm": abs(steps["grad_norm"] / expected["grad_norm"] - 1),
            "norm_before": expected["grad_norm"], "loss": abs(steps["loss"] - expected["loss"]), "steps": steps["steps"],
            "share": max(begun, share(one)) if zero == 3 else None}


def states(zero):
    """A local state restored; then a step on both; and back."""
    other, one = learned(made("qwen3"))[0], learned(made("qwen3", zero), AGAIN)[0]
    begun = copied(other.state())
    one.restore(begun)
    taken = same(one.state(), begun)
    learned(one, AGAIN), learned(other, AGAIN)
    back = made("qwen3")
    back.restore(everywhere(one.state()))
    fresh = made("qwen3", zero)
    fresh.restore(copied(made("qwen3").state()))
    return {"taken": taken, "apart": distance(one, other)[0], "back": same(back.state(), one.state()),
            "fresh": same(fresh.state(), made("qwen3").state())}


def between_stages():
    """Stage 3 to 1 to 2 to 3; one rank takes what two left, too."""
    three = learned(made("gpt2", 3))[0]
    state = everywhere(three.state())
    if RANK == 0:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, OUT / f"{RANKS}.safetensors")
    found = load_file(OUT / "2.safetensors") if RANKS == 1 else state
    found = {name: found[name] for name in state}
    kept = []
    for zero in (1, 2, 3):
        one = made("gpt2", zero)
        one.restore(state)
        kept.append(same(one.state(), state))
        one.restore(found)
        kept.append(same(one.state(), found))
        state = everywhere(one.state())
    return all(kept)


def files():
    one, other = learned(made("qwen3", 3))[0], made("qwen3")
    one.save(OUT / f"saved{RANKS}")
    other.load(OUT / f"saved{RANKS}")
    weights = dict(one.weights())
    loaded = same(dict(other.weights()), weights)
    again = made("qwen3", 3)
    again.load(OUT / f"saved{RANKS}")
    rows = BATCH.rows(list(range(3)))
    return loaded and same(dict(again.weights()), weights) and torch.equal(again.forward(rows)["logprobs"], other.forward(rows)["logprobs"])


def parts():
    """Whether ``pieces`` are what their places say, cover each weight once, and are copies of nothing."""
    one = learned(made("gpt2", 3))[0]
    pieces, good = one.pieces(), True
    for name, tensor in one.weights():
        held, covered = pieces.pop(name), torch.zeros_like(tensor)
        for piece in held.pieces:
            place = tuple(slice(*sides) for sides in piece.box)
            good &= torch.equal(piece.view, tensor[place])
            covered[place] += 1
        dist.all_reduce(covered)
        good &= held.shape == tuple(tensor.shape) and bool((covered == 1).all())
    return good and not pieces


def skipped(zero):
    """A gradient that is not finite, on the first rank alone, between two steps and before the first."""
    one, other = made("llama", zero, warmup=9), made("llama", zero, warmup=9)
    broken = [[[0], [1, 2]]]
    kept = []
    for steps in (STEPS, AGAIN):
        before = copied(one.state())
        _, told = learned(one, broken, objective=breaking)
        kept.append(same(one.state(), before) and told["skipped_steps"] == 1 and told["steps"] == 0)
        learned(one, steps), learned(other, steps)
    return {"kept": all(kept), "after": same(one.state(), other.state()), "steps": one.steps}


def heads(head, zero=3):
    shape = "reward" if head == "scores" else "llama"
    one, other = (learned(made(shape, stage, head), PAIRS, head)[0] for stage in (zero, None))
    restored = made(shape, zero, head)
    restored.restore(copied(other.state()))
    one.save(OUT / f"{head}{zero}{RANKS}")
    loaded = local.Trainer(ModelSpec(OUT / f"{head}{zero}{RANKS}", head))
    rows = BATCH.rows(list(range(4)))
    gap = (loaded.forward(rows, (head,))[head] - one.forward(rows, (head,))[head]).abs().max()
    apart, names = distance(one, other)
    return {"apart": apart, "names": names, "restored": same(restored.state(), other.state()), "saved": float(gap)}


def adapters(dtype, zero=3):
    one, other = (learned(made("gpt2", stage, lora=4, lr=5e-3, dtype=dtype))[0] for stage in (zero, None))
    apart, names = distance(one, other)
    restored = made("gpt2", zero, lora=4, dtype=dtype)
    restored.restore(copied(other.state()))
    back = made("gpt2", lora=4, dtype=dtype)
    back.restore(everywhere(one.state()))
    one.save(OUT / f"lora{zero}{RANKS}{dtype}")
    return {"apart": apart, "names": names, "restored": same(restored.state(), other.state()), "back": same(back.state(), one.state()),
            "learning": list(one.learning) == list(other.network.parameters())}


def low(zero=3):
    one, other = (learned(made("qwen3", stage, dtype="bfloat16"))[0] for stage in (zero, None))
    rows = BATCH.rows([0, 1])
    gap = (one.forward(rows)["logprobs"] - other.forward(rows)["logprobs"]).abs().max()
    return {"apart": distance(one, other)[0], "gap": float(gap), "float32": all(t.dtype == torch.float32 for _, t in one.weights())}


def frozen(zero=3):
    one, other = made("qwen3", zero, trained=False), made("qwen3", trained=False)
    rows = BATCH if RANK == 0 else BATCH.rows([])
    equal = torch.equal(one.forward(rows, ("entropy",))["entropy"], other.forward(rows, ("entropy",))["entropy"])
    restored = made("gpt2", zero, trained=False)
    restored.restore(copied(made("gpt2", trained=False).state()))
    one.sleep(), one.wake()
    return {"equal": equal, "share": share(one), "state": same(one.state(), other.state()), "steps": restored.steps}


def in_memory(trainer):
    """Bytes of this rank's storages, each once: of weights and their flat buffer, of the optimizer's copies and moments, of gradients."""
    optimizer = trainer.engine.optimizer
    weights = [getattr(p, "ds_tensor", p) for p in trainer.network.module.parameters()]
    moments = [tensor for state in optimizer.optimizer.state.values() for tensor in state.values() if tensor.dim()]
    gradients = [optimizer.grad_partitions_flat_buffer] if hasattr(optimizer, "grad_partitions_flat_buffer") else []
    parts = weights, [*flats(optimizer), *moments], gradients
    return [sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()) for tensors in parts]


def asleep(zero):
    """Before the first step, when there are no moments, and after it; and what is freed: bytes when awake, asleep and awake again."""
    one, other = made("llama", zero), made("llama", zero)
    for _ in range(2):
        before = in_memory(one)
        one.sleep("optimizer"), one.sleep()
        freed = [before, in_memory(one)]
        one.wake()
        freed.append(in_memory(one))
        learned(one, AGAIN), learned(other, AGAIN)
    whole = sum(p.numel() * 4 for p in made("llama").network.parameters().values())
    return {"same": same(one.state(), other.state()), "freed": freed, "whole": whole}


def recomputed():
    """Layers, and a few tokens' logits at a time, computed again in the backward pass."""
    one, other = learned(made("gemma3", 3, gradient_checkpointing=True, logit_tokens=3))[0], learned(made("gemma3"))[0]
    learned(one, AGAIN), learned(other, AGAIN)
    rows = BATCH if RANK == 0 else BATCH.rows([1])
    gap = (one.forward(rows)["logprobs"] - other.forward(rows)["logprobs"]).abs().max()
    return {"apart": distance(one, other)[0], "gap": float(gap), "share": share(one)}


def measured():
    yield "equality", {f"{shape} {zero}": equality(shape, zero) for shape, zero in
                       [("llama", 1), ("llama", 2), ("llama", 3), *((s, 3) for s in ("gpt2", "qwen3", "gemma3") if RANKS > 1)]}
    yield "between stages", between_stages()
    yield "skipped", {zero: skipped(zero) for zero in (STAGES if RANKS > 1 else (3,))}
    if RANKS > 1:
        yield "states", {zero: states(zero) for zero in STAGES}
        yield "files", files()
        yield "parts", parts()
        yield "frozen", frozen()
        yield "asleep", {zero: asleep(zero) for zero in STAGES}
        yield "heads", {head: heads(head) for head in ("values", "scores")}
        yield "adapters", {dtype: adapters(dtype) for dtype in ("float32", "bfloat16")}
        yield "low", low()
        yield "recomputed", recomputed()


ALONE = join()
gc.freeze()  # DeepSpeed collects garbage for each trainer, among all that was imported
report = dict(measured())
if RANK == 0:
    (OUT / f"{RANKS}.json").write_text(json.dumps(report))
dist.barrier()
