"""Packed rows compute the same as each row alone: the layout, attention over it, full models, and updates."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from rlflow import loss
from rlflow.author.batch import Batch
from rlflow.backends.local import Trainer
from rlflow.backends.local.attention import PackedMask, attend, by_copies
from rlflow.backends.local.network import load_network
from rlflow.backends.local.packing import packed
from rlflow.backends.local.passes import can_pack, hidden_states
from rlflow.backends.local.sequences import sequences
from rlflow.training.protocols import ModelSpec


def rows(seed=0):
    """Return ten rows of three prompts. Two prompts have a common prefix; one row has its own prompt, one has
    no response.
    """
    chance = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(3, 60, (count,), generator=chance).tolist()  # noqa: E731
    start = draw(11)
    prompts = [start, [*start, *draw(5)], draw(14)]
    lengths = [7, 3, 7, 12, 1, 7, 9, 0, 4, 4]
    return Batch.of(
        prompt_tokens=[*(prompts[i % 3] for i in range(9)), draw(3)],
        tokens=[draw(n) for n in lengths],
        mask=[[i != 1 for i in range(n)] for n in lengths],
        temperature=[0.7, 1.0] * 5,
    )


def test_each_token_has_its_position_and_shared_ones_appear_once():
    batch = rows()
    layout = packed(batch, torch.device("cpu"))
    prompts, tokens = (batch.data[name] for name in ("prompt_tokens", "tokens"))
    whole = [
        torch.cat(pair)
        for pair in zip(*(data.value.split(data.lengths.tolist()) for data in (prompts, tokens)), strict=True)
    ]
    ids, positions = layout.ids[0], layout.positions[0]
    # prompts of 11 and 16 tokens share 10
    assert ids.shape == positions.shape == (sum(map(len, whole)) - 10 * 5 - 13 * 2,)
    assert [int(ids[i]) for i in layout.last] == [int(row[-1]) for row in whole]
    assert positions[layout.last].tolist() == [len(row) - 1 for row in whole]
    before = [
        int(row[at])
        for row, start, count in zip(whole, prompts.lengths, tokens.lengths, strict=True)
        for at in range(int(start) - 1, int(start + count) - 1)
    ]
    assert ids[layout.before].tolist() == before
    # no position is read twice, so gradients need no sums in unknown order
    assert len(set(layout.before.tolist())) == len(before)
    for block in layout.blocks:
        assert positions[block.start : block.start + block.shared].tolist() == list(range(block.shared))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty prompt in row 1"):
        packed(Batch.of(prompt_tokens=[[3], []], tokens=[[4], [5]]), torch.device("cpu"))


def dense(query, key, value, layout, visible):
    """Compute attention over all tokens at once, each with its own row."""
    count = layout.ids.shape[1]
    seen = torch.zeros(count, count, dtype=torch.bool)
    for block in layout.blocks:
        common = torch.arange(block.start, block.start + block.shared)
        own = [
            torch.arange(run.start + i * run.length, run.start + (i + 1) * run.length)
            for run in block.runs
            for i in range(run.count)
        ]
        for each in own:
            row = torch.cat([common, each])
            place = torch.arange(len(row))
            seen[row[:, None], row] = visible(0, 0, place[:, None], place[None])
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.mT * 0.3).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


VISIBLE = {
    "causal": None,
    "window": sliding_window_causal_mask_function(4),
    "chunks": chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.int64)),
}


@pytest.mark.parametrize("way", [attend, by_copies])
@pytest.mark.parametrize("kind", list(VISIBLE))
def test_attention_and_its_gradients_match_each_row_alone(way, kind):
    layout = packed(rows(), torch.device("cpu"))
    chance = torch.Generator().manual_seed(1)
    count = layout.ids.shape[1]
    inputs = [
        torch.randn(1, heads, count, 8, dtype=torch.float64, generator=chance, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    mask = PackedMask(layout.blocks, VISIBLE[kind])
    found = way(*inputs, mask, 0.3)
    expected = dense(*inputs, layout, VISIBLE[kind] or (lambda _, __, q, k: k <= q))
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=0)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=chance)
    for own, other in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(own, other, atol=1e-11, rtol=0)


def test_unsupported_outputs_of_packed_rows_are_refused():
    layout = packed(rows(), torch.device("cpu"))
    some = torch.zeros(1, 2, layout.ids.shape[1], 8)
    for given in ({"dropout": 0.1}, {"is_causal": False}, {"position_bias": some}):
        with pytest.raises(ValueError, match="plain causal attention"):
            attend(some, some, some, PackedMask(layout.blocks, None), **given)


@pytest.mark.parametrize("shape", ["gpt2", "qwen3", "llama", "gemma3", "gemma2"])
def test_models_with_the_attention_of_torch_compute_packed_rows(folders, shape):
    network = load_network(ModelSpec(folders[shape], dtype="float64"))
    assert can_pack(network) == (network.module.config._attn_implementation == "sdpa")
    if can_pack(network):
        layouts = [layout(rows(), network.device) for layout in (packed, sequences)]
        found, expected = (hidden_states(network, layout)[layout.before] for layout in layouts)
        # the others norm in float32
        torch.testing.assert_close(found, expected, atol=1e-9 if shape == "gpt2" else 1e-5, rtol=0)


@pytest.mark.parametrize("given", [{"trained": True}, {}], ids=["trained", "frozen"])
def test_models_in_low_precision_are_packed(folders, given):
    assert can_pack(load_network(ModelSpec(folders["gemma3"], dtype="bfloat16", **given)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_sees_other_rows_is_not_packed(folders, dtype):
    network = load_network(ModelSpec(folders["gemma3"], dtype=dtype))
    network.backbone.layers[-1].register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True) / 32)
    assert not can_pack(network)


def test_a_model_with_state_between_tokens_is_not_packed(tmp_path):
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1, initializer_range=0.1
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert not can_pack(load_network(ModelSpec(tmp_path)))


@loss(new=("logprobs", "entropy"))
def both(new, logprobs):
    return -(new.logprobs - logprobs).exp() - 0.1 * new.entropy, {}


def learned(folder, packed_rows, ahead=False, **settings):
    """Return the gradients of one step, from a forward as columns, and the log-probs."""
    trainer = Trainer(
        ModelSpec(folder, trained=True, dtype="float64"), Trainer.Settings(packed=packed_rows, **settings)
    )
    assert trainer.packs == packed_rows
    found, clip = {}, trainer._clip

    def kept(learning):
        found.update(
            {
                name: each.grad.clone()
                for name, each in trainer.network.parameters().items()
                if each.grad is not None
            }
        )
        return clip(learning)

    trainer._clip = kept
    batch = rows()
    batch |= (trainer.forward_ahead if ahead else trainer.forward)(batch)
    metrics = trainer.update(batch, both)
    return found | {"logprobs": batch["logprobs"]}, metrics


@pytest.mark.parametrize(
    "settings",
    [{}, {"micro_tokens": 40}, {"gradient_checkpointing": True}, {"ahead": True}, {"lora": 2}],
    ids=lambda given: next(iter(given), "whole"),
)
def test_gradients_equal_the_gradients_of_padded_rows(folders, settings):
    """Up to rounding in float64: complete and split groups, recomputed layers, a kept forward, adapters."""
    (found, metrics), (expected, others) = (
        learned(folders["gpt2"], packed_rows, **settings) for packed_rows in (True, False)
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-9, rtol=1e-9, msg=name)
    assert metrics == pytest.approx(others, rel=1e-9)


def test_packed_steps_repeat_bit_for_bit(folders):
    one, other = (learned(folders["qwen3"], True, ahead=ahead)[0] for ahead in (False, True))
    assert all(torch.equal(one[name], other[name]) for name in one)
