"""One rank of a pool that trains with the fsdp backend beside the local one, and says of each check how it went.

python fsdp_rank.py RANK RANKS FOLDER MODELS CHECKS… : FOLDER is where the ranks meet and write what they found.
"""

import json
import sys
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fsdp_pair import ALONE, FOLDER, RANK, RANKS, Pair, rows
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from rlflow import loss
from rlflow.backends import local
from rlflow.backends.fsdp.ranks import Ranks, box, copies, own, whole
from rlflow.errors import PlanError
from rlflow.training.learning import Share
from rlflow.training.objective import Totals
from rlflow.training.peers import Peers
from rlflow.training.protocols import ModelSpec
from rlflow.training.rows import mask_counts

torch.set_num_threads(1)
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


@check
def gpt2():
    Pair("gpt2").everything()


@check
def llama():
    Pair("llama").everything()


@check
def gemma3():
    Pair("gemma3", gradient_checkpointing=True).everything()


@check
def qwen3():
    """Tied weights; and what else there is to a model with an optimizer."""
    pair = Pair("qwen3")
    kept = sum(own(tensor).nbytes for _, tensor in pair.fsdp.shards())
    assert kept <= {1: 1.0, 2: 0.6, 4: 0.35}[RANKS] * sum(tensor.nbytes for _, tensor in pair.local.weights())
    pair.everything()
    moves(pair)
    folders(pair)
    round_trip(pair)


def in_memory(trainer):
    """Bytes of this rank's storages, each once: of its part of the model, and of its moments."""
    moments = [tensor for state in trainer.optimizer.state.values() for tensor in state.values() if tensor.dim()]
    return [sum({own(t).untyped_storage()._cdata: own(t).untyped_storage().nbytes() for t in tensors}.values())
            for tensors in ([*trainer.network.module.state_dict().values()], moments)]  # fmt: skip


def moves(pair):
    """Out of memory and back, part by part, and then on as if nothing had been."""
    before = in_memory(pair.fsdp)
    assert min(before) > 0
    pair.fsdp.sleep("optimizer")
    assert in_memory(pair.fsdp) == [before[0], 0]
    pair.fsdp.sleep()
    assert in_memory(pair.fsdp) == [0, 0]
    pair.fsdp.wake()
    assert in_memory(pair.fsdp) == before
    pair.learn()
    pair.close()


def folders(pair):
    """A folder that both write alike, byte by byte, and read."""
    folder = FOLDER / f"saved{RANKS}"
    pair.local.restore(agreed(pair.fsdp.state()))
    pair.fsdp.save(folder)
    dist.barrier()
    other = local.Trainer(ModelSpec(folder, "logprobs", True))
    for (name, found), (_, wanted) in zip(other.weights(), pair.local.weights(), strict=True):
        assert torch.equal(found, wanted), name
    fresh = Pair("qwen3")
    fresh.fsdp.load(folder)
    for (name, found), (_, wanted) in zip(fresh.fsdp.weights(), other.weights(), strict=True):
        assert torch.equal(found, wanted), name


def agreed(state):
    """What the first rank has, on all."""
    box = [state]
    dist.broadcast_object_list(box)
    return box[0]


def round_trip(pair):
    """local → fsdp → local, bit by bit, and then the same steps."""
    pair.learn()
    state = {name: tensor.clone() for name, tensor in pair.local.state().items()}
    pair.fsdp.restore(state)
    found = agreed(pair.fsdp.state())
    assert list(found) == list(state)
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    pair.learn()
    pair.close()
    pair.local.restore(agreed(pair.fsdp.state()))
    pair.learn()
    pair.close()


@check
def values():
    pair = Pair("llama", "values")
    pair.everything()
    round_trip(pair)


@check
def scores():
    pair = Pair("reward", "scores")
    pair.everything()
    round_trip(pair)


@check
def adapters():
    pair = Pair("qwen3", lora=4, lr=1e-2)
    assert list(pair.fsdp.network.parameters()) == list(pair.local.network.parameters())
    pair.everything()
    round_trip(pair)


@check
def transposed_adapters():
    pair = Pair("gpt2", "values", lora=4, lora_targets="attention", lr=1e-2)
    pair.everything()
    round_trip(pair)


@check
def matched():
    """Weights that are cut where a tensor-parallel sampler cuts them, along their inputs: the same numbers, and the same state."""
    names = {f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")}
    pair = Pair("llama", dims=tuple((name, 1) for name in names))
    assert {name for name, tensor in pair.fsdp.shards() if tensor.placements == (Shard(1),)} == names
    pair.everything()
    round_trip(pair)


@check
def frozen():
    Pair("llama", trained=False).forward()
    Pair("reward", "scores", trained=False).forward()
    Pair("gemma2", trained=False, dtype="bfloat16").forward(atol=0.05)


@check
def experts():
    """Of which the file has other names than the model: it is loaded whole, and then sharded."""
    folder = FOLDER / "experts"
    if RANK == 0:
        config = Qwen2MoeConfig(vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=1,
                                shared_expert_intermediate_size=24, num_experts=4, num_attention_heads=4, num_key_value_heads=2)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    pair = Pair(folder)
    pair.forward()
    pair.learn()
    pair.close()


@check
def low():
    """bfloat16 is rounded in other places than under autocast: the same to a percent."""
    for settings in ({}, {"lora": 4}):
        pair = Pair("qwen3", dtype="bfloat16", **settings)
        assert {p.dtype for p in pair.fsdp.network.parameters().values()} == {torch.float32}
        pair.forward(atol=0.2)
        one, other = pair.learn()
        assert abs(one.steps["loss"] - other.steps["loss"]) <= 0.02 * abs(one.steps["loss"])
        assert abs(one.steps["grad_norm"] - other.steps["grad_norm"]) <= 0.05 * one.steps["grad_norm"]
        pair.close(5e-3)


@loss
def broken(new, mask):
    return -new.logprobs * float("inf"), {}


@check
def skipped():
    """A gradient that is not finite changes nothing on any rank, even where one rank alone has it."""
    pair = Pair("llama")
    batch = rows()
    totals = Totals.of(mask_counts(batch))
    share = [Share(list(torch.arange(12).split(1)) if pair.rank == pair.data - 1 else [], totals)]
    before = pair.fsdp.state()
    learned = pair.fsdp.update_shares(batch, broken, share, "tokens", {})
    assert learned.steps["skipped_steps"] == 1
    assert pair.fsdp.steps == 0
    after = pair.fsdp.state()
    assert all(torch.equal(after[name], before[name]) for name in before)
    pair.everything()


@check
def split_llama():
    pair = Pair("llama", tensor_parallel=2)
    pair.everything()
    round_trip(pair)


@check
def split_qwen3():
    pair = Pair("qwen3", tensor_parallel=2, gradient_checkpointing=True)
    kept = sum(own(tensor).nbytes for _, tensor in pair.fsdp.shards())
    assert kept <= {2: 0.6, 4: 0.35}[RANKS] * sum(tensor.nbytes for _, tensor in pair.local.weights())
    pair.everything()
    round_trip(pair)


@check
def split_gemma3():
    Pair("gemma3", tensor_parallel=2).everything()


@check
def split_heads():
    Pair("qwen3", "values", tensor_parallel=2).everything()
    Pair("reward", "scores", tensor_parallel=2).everything()


@check
def uneven():
    """Parts of which some are smaller or empty are read whole and written as they lie."""
    ranks = Ranks.of("cpu", 2)
    for wide in (2, 6, 10):
        torch.manual_seed(wide)
        layer = torch.nn.Linear(7, wide)
        wanted = {name: p.detach().clone() for name, p in layer.named_parameters()}
        parallelize_module(layer, ranks.tensor, ColwiseParallel())
        fully_shard(layer, mesh=ranks.data)
        for name, parameter in layer.named_parameters():
            assert torch.equal(whole(parameter.detach()), wanted[name]), (wide, name, parameter.placements)
            assert torch.equal(own(parameter.detach()), wanted[name][box(parameter)]), (wide, name, box(parameter))
            assert copies(parameter) == 1


@check
def unsplit():
    for model, head, settings, words in [("gpt2", "logprobs", {}, "no plan in its config"), ("llama", "logprobs", {"lora": 4}, "adapters"),
                                         ("llama", "logprobs", {"shard": "none"}, "--shard full")]:
        with pytest.raises(PlanError, match=words):
            Pair(model, head, tensor_parallel=2, **settings)


@check
def data_parallel():
    """Each rank has the whole model, and gradients are added up."""
    pair = Pair("llama", shard="none")
    assert sum(t.nbytes for _, t in pair.fsdp.shards()) == sum(t.nbytes for _, t in pair.local.weights())
    pair.everything()
    state = pair.fsdp.state()
    pair.local.restore(state)
    pair.learn()
    pair.close()


def join():
    store = dist.FileStore(str(FOLDER / f"meeting{RANKS}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS, timeout=timedelta(seconds=120))
    ALONE.append(Peers([dist.new_group([rank]) for rank in range(RANKS)][RANK]))


def main():
    join()
    found = {}
    for name in sys.argv[5:]:
        start = time.monotonic()
        try:
            CHECKS[name]()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        print(RANK, name, round(time.monotonic() - start, 1), found[name], flush=True)
        if found[name]:  # the ranks are no longer at the same place
            break
    (FOLDER / f"found{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
