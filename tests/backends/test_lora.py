"""Low-rank adapters: the base stays unchanged, the generator samples from the sum, and a saved model has
plain weights.
"""

import math
import sys

import peft
import pytest
import torch
from training_claims import ranking, regression
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2MoeConfig

from rlflow import loss
from rlflow.author.batch import Batch
from rlflow.backends.local import Generator, Trainer, lora
from rlflow.backends.local.tokenizer import copy_tokenizer
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec, Sampling

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not

# peft asks a model of transformers from 5.20 on for it
PEFTS_OWN = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
SHAPES = ["gpt2", "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma3"))]
PROMPTS = Batch.of(prompt_tokens=[[5, 6, 7], [8], list(range(5, 25))])


def trainer(folder, head="logprobs", dtype="float32", **settings):
    return Trainer(
        ModelSpec(folder, head, True, dtype=dtype), Trainer.Settings(**{"lr": 1e-2, "lora": 4} | settings)
    )


@loss
def likelihood(new, mask):
    return -new.logprobs, {}


OBJECTIVES = {
    "logprobs": (likelihood, "tokens"),
    "values": (regression, "tokens"),
    "scores": (ranking, "rows"),
}


def rows(count=6):
    chance = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 7, (count,), generator=chance).tolist()
    return Batch.of(
        prompt_tokens=[[5, 6, 7]] * count,
        tokens=[torch.randint(3, 60, (n,), generator=chance) for n in lengths],
        mask=[[True] * n for n in lengths],
        group=[i // 2 for i in range(count)],
    )


def learned(one, head="logprobs", seed=0):
    objective, mean = OBJECTIVES[head]
    metrics = one.update(rows(), objective, minibatch=2, mean=mean, seed=seed)
    assert metrics["steps"] == 3
    return one


def switched(one, on):
    for layer in one.network.adapted.values():
        layer.enable_adapters(on)


@pytest.mark.parametrize("shape", SHAPES)
def test_disabled_adapters_leave_the_reference_bit_for_bit(folders, shape):
    actor, reference = trainer(folders[shape]), Trainer(ModelSpec(folders[shape]))
    wanted = reference.forward(rows())["logprobs"]
    assert torch.equal(actor.forward(rows())["logprobs"], wanted)  # before the first step they change nothing
    learned(actor)
    assert (actor.forward(rows())["logprobs"] - wanted).abs().max() > 1e-3
    assert all(lora.is_adapter(name) for name in actor.network.parameters())
    assert len(actor.network.parameters()) == 2 * len(actor.network.adapted) > 0
    switched(actor, False)
    assert torch.equal(actor.forward(rows())["logprobs"], wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_generator_samples_from_the_weights_of_the_trainer(folders, shape):
    actor, generator = learned(trainer(folders[shape])), Generator(ModelSpec(folders[shape]))
    generator.receive(actor.weights(), 1)
    batch = generator.generate(PROMPTS, Sampling(samples=4, max_tokens=12), range(12)) | PROMPTS
    torch.testing.assert_close(actor.forward(batch)["logprobs"], batch["sampled_logprobs"], atol=1e-5, rtol=0)
    base = Trainer(ModelSpec(folders[shape])).forward(batch)["logprobs"]
    assert (base - batch["sampled_logprobs"]).abs().max() > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_a_saved_model_is_a_plain_folder_of_merged_weights(folders, tmp_path, shape):
    actor = learned(trainer(folders[shape]))
    actor.save(tmp_path)
    model, base = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path, folders[shape])
    )
    merged = dict(actor.weights())
    assert all(torch.equal(model[name], tensor) for name, tensor in merged.items())
    assert model.keys() == base.keys()
    assert {name for name in merged if not torch.equal(base[name], merged[name])} == {
        f"{name}.weight" for name in actor.network.adapted
    }
    again = Trainer(ModelSpec(tmp_path)).forward(rows())["logprobs"]
    torch.testing.assert_close(again, actor.forward(rows())["logprobs"], atol=1e-5, rtol=0)
    other = learned(trainer(folders[shape]), seed=5)
    other.load(tmp_path)
    assert torch.equal(other.forward(rows())["logprobs"], again)


@pytest.mark.parametrize("head", ["values", "scores"])
def test_a_head_trains_all_its_weights_and_is_saved(folders, tmp_path, head):
    one = trainer(folders["llama"], head)
    assert one.network.head.weight.abs().max() == 0
    learned(one, head)
    assert one.network.head.weight.abs().max() > 0
    one.save(tmp_path)
    again = Trainer(ModelSpec(tmp_path, head)).forward(rows(), (head,))[head]
    torch.testing.assert_close(again, one.forward(rows(), (head,))[head], atol=1e-5, rtol=0)
    if head == "scores":
        assert AutoModelForSequenceClassification.from_pretrained(tmp_path).score.weight.abs().max() > 0


@pytest.mark.parametrize("head", ["logprobs", "values", "scores"])
def test_a_restored_state_continues_bit_for_bit(folders, head):
    straight, resumed = (
        learned(trainer(folders["llama"], head), head),
        trainer(folders["llama"], head, lr=5e-2),
    )
    state = {name: tensor.clone() for name, tensor in straight.state().items()}
    learned(straight, head, seed=2)
    learned(resumed, head, seed=7)
    resumed.restore(state)
    resumed.schedule = straight.schedule
    learned(resumed, head, seed=2)
    assert state["steps"] == 3
    assert straight.state().keys() == resumed.state().keys()
    assert all(torch.equal(tensor, resumed.state()[name]) for name, tensor in straight.state().items())


def test_adapters_of_another_rank_or_base_are_refused(folders):
    state = learned(trainer(folders["llama"])).state()
    with pytest.raises(PlanError, match=r"do not match the adapters(.|\n)*\[4, 32\](.|\n)*\[2, 32\]"):
        trainer(folders["llama"], lora=2).restore(state)
    with pytest.raises(PlanError, match="0 adapter weights"):
        trainer(folders["llama"]).restore(learned(trainer(folders["llama"], lora=0)).state())
    other = trainer(folders["llama"])
    with torch.no_grad():
        next(iter(other.network.module.parameters()))[0, 0] += 1
    with pytest.raises(PlanError, match="not the base of the checkpoint's adapters"):
        other.restore(state)


def test_full_training_continues_from_merged_adapters(folders):
    adapted, whole = learned(trainer(folders["llama"])), trainer(folders["llama"], lora=0)
    whole.restore(adapted.state())
    torch.testing.assert_close(
        whole.forward(rows())["logprobs"], adapted.forward(rows())["logprobs"], atol=1e-5, rtol=0
    )


def test_adapters_may_cover_only_the_attention(folders):
    names = trainer(folders["llama"], lora_targets="attention").network.adapted
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.slow
def test_only_linear_layers_of_an_expert_model_have_adapters(folders, tmp_path):
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=1,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    copy_tokenizer(folders["llama"], tmp_path / "model")
    actor, generator = learned(trainer(tmp_path / "model")), Generator(ModelSpec(tmp_path / "model"))
    names = {name.rpartition(".")[2] for name in actor.network.adapted}
    assert names == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "shared_expert_gate",
    }
    assert len(actor.network.parameters()) == 2 * len(actor.network.adapted)
    generator.receive(actor.weights(), 1)
    batch = generator.generate(PROMPTS, Sampling(samples=4, max_tokens=12), range(12)) | PROMPTS
    torch.testing.assert_close(actor.forward(batch)["logprobs"], batch["sampled_logprobs"], atol=1e-5, rtol=0)
    actor.save(tmp_path / "saved")
    again = Trainer(ModelSpec(tmp_path / "saved")).forward(batch)["logprobs"]
    torch.testing.assert_close(again, batch["sampled_logprobs"], atol=1e-5, rtol=0)


def test_a_bfloat16_base_keeps_its_dtype_and_adapters_are_float32(folders, tmp_path):
    actor = learned(trainer(folders["qwen3"], dtype="bfloat16"))
    assert {p.dtype for p in actor.network.parameters().values()} == {torch.float32}
    assert {tensor.dtype for _, tensor in actor.weights()} == {torch.bfloat16}
    generator = Generator(ModelSpec(folders["qwen3"], dtype="bfloat16"))
    generator.receive(actor.weights(), 1)
    batch = generator.generate(PROMPTS, Sampling(samples=4, max_tokens=12), range(12)) | PROMPTS
    assert (actor.forward(batch)["logprobs"] - batch["sampled_logprobs"]).abs().mean() < 0.05


def test_the_seed_decides_the_adapters_and_a_frozen_model_has_none(folders):
    def first(seed):
        one = Trainer(ModelSpec(folders["llama"], trained=True, seed=seed), Trainer.Settings(lora=4))
        return next(iter(one.network.parameters().values()))

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))
    assert not Trainer(ModelSpec(folders["llama"]), Trainer.Settings(lora=4)).network.adapted


def test_checkpointed_layers_give_the_same_adapters(folders):
    one, other = (learned(trainer(folders["llama"], gradient_checkpointing=on)) for on in (False, True))
    for (_, a), (_, b) in zip(one.weights(), other.weights(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_missing_peft_is_reported_with_a_remedy(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(PlanError, match=r"pip install 'rlflow-dag\[lora\]'"):
        trainer(folders["llama"])


def difference(one, other):
    """Return |one - other| / |other| over all tensors."""
    pairs = [(one[name].double(), tensor.double()) for name, tensor in other.items()]
    return math.sqrt(
        sum(float((a - b).square().sum()) for a, b in pairs) / sum(float(b.square().sum()) for _, b in pairs)
    )


def deltas(one):
    return {
        f"{name}.weight": lora.merged(layer, torch.zeros(layer.base_layer.weight.shape), one.network.whole)
        for name, layer in one.network.adapted.items()
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_a_bfloat16_trainer_sends_float32_weights(folders, tmp_path, shape):
    actor = learned(trainer(folders[shape], dtype="bfloat16", lr=1e-5))
    base = {name: tensor.detach().clone() for (name, *_), tensor in actor.network.own()}
    wanted = deltas(actor)
    actor.save(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    state = {
        name.removeprefix("parameters/"): tensor
        for name, tensor in actor.state().items()
        if name.startswith("parameters/")
    }
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    for found in (saved, state):
        assert difference({name: found[name] - base[name].float() for name in wanted}, wanted) < 1e-2
    assert all(
        torch.equal(saved[name], tensor.float()) for name, tensor in base.items() if name not in wanted
    )


def test_the_share_lost_to_rounding_in_a_merge_is_measured(folders):
    actor = trainer(folders["llama"], dtype="bfloat16", lr=1e-5)
    assert actor._rounding() == {"merge_rounding": 0.0}  # before the first step they change nothing
    share = actor.update(rows(), likelihood, minibatch=2)["merge_rounding"]
    base = {name: tensor.detach().clone() for (name, *_), tensor in actor.network.own()}
    sampled, wanted = dict(actor.weights()), deltas(actor)
    assert share == pytest.approx(
        difference({name: sampled[name].double() - base[name].double() for name in wanted}, wanted), rel=1e-3
    )
    assert share > 0.5
    assert trainer(folders["llama"]).update(rows(), likelihood)["merge_rounding"] < 1e-3
    assert "merge_rounding" not in trainer(folders["llama"], lora=0).update(rows(), likelihood)


@PEFTS_OWN
@pytest.mark.parametrize(
    ("shape", "settings"),
    [("gpt2", {}), ("llama", {}), ("llama", {"lora_targets": "attention", "lora_alpha": 3.0})],
)
def test_peft_loads_the_saved_adapters(folders, tmp_path, shape, settings):
    actor = learned(trainer(folders[shape], **settings))
    actor.save(tmp_path)
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folders[shape]), tmp_path / "adapter"
    )
    assert loaded.peft_config["default"].base_model_name_or_path == str(folders[shape])
    merged, saved = (
        loaded.merge_and_unload().state_dict(),
        AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(),
    )
    assert merged.keys() == saved.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=0)


@PEFTS_OWN
def test_adapters_of_a_reward_model_include_its_head(folders, tmp_path):
    one = learned(trainer(folders["llama"], "scores"), "scores")
    one.save(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(folders["llama"], num_labels=1)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().state_dict()
    torch.testing.assert_close(loaded["score.weight"], one.network.head.weight.detach(), atol=0, rtol=0)
