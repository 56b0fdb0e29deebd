"""The numbers of a row do not depend on other rows, on both sides of every length at which a model computes
differently.
"""

import pytest
import torch
from every_causal import BOUNDARY, NAMES, NotTiny, model, ropes, tiny
from transformers import AutoModelForCausalLM

from rlflow.author.batch import Batch
from rlflow.backends.local import Generator, Trainer
from rlflow.backends.local.tokenizer import copy_tokenizer
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec, Sampling

SHORT, LONG = 10, 20  # the longest row of a run, on both sides of the boundary
PROMPTS = {
    SHORT: [[5, 9, 11], [7], [4, 4, 8, 20]],
    LONG: [[5, 9, 11], [7], [4, 4, 8, 20, 33, 12, 9, 8, 7, 6, 5, 3, 4, 2]],
}
STEPS = {SHORT: 6, LONG: 12}  # sampled tokens: after prompts of 8 tokens, across the boundary
TOKENS = [[12, 40, 3, 1], [1, 1, 60, 8, 9, 10], [30, 5, 1, 1, 7, 9]]


def saved(made, folder, tokenizer):
    made.save_pretrained(folder)
    copy_tokenizer(tokenizer, folder)
    return folder


def rows_of(batch):
    """Return (prompt, tokens) of each row."""
    columns = [batch.data[name] for name in ("prompt_tokens", "tokens")]
    return list(zip(*(column.value.split(column.lengths.tolist()) for column in columns), strict=True))


def alone(plain, prompt, tokens, longest):
    """Return the log-probs of a row in a plain forward. The row is padded to the longest of the run; a causal
    model ignores padding.
    """
    row = torch.cat([prompt, tokens])
    filled = torch.nn.functional.pad(row, (0, longest - len(row)))
    with torch.no_grad():
        logits = plain(filled[None], use_cache=False).logits[0, len(prompt) - 1 : len(row) - 1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def check_rows(folder, longest, atol, steps=1e-5):
    """Check one batch, and rows sampled from prompts on both sides, against each row alone.

    steps: the tolerance, like ``atol``, for rows sampled step by step; some models compute them with other
    sums than a full row.
    """
    trainer = Trainer(ModelSpec(folder, trained=True, longest=longest))
    batch = Batch.of(prompt_tokens=PROMPTS[longest], tokens=TOKENS)
    given = trainer.forward(batch)["logprobs"]
    each = [trainer.forward(batch.rows([row]))["logprobs"][0] for row in range(len(batch))]
    sampled, logprobs = sample(folder, longest)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    again = trainer.forward(sampled)["logprobs"] if sampled is not None else logprobs
    for rows, got, off in (
        (batch, given, atol),
        (batch, each, atol),
        (sampled, again, atol),
        (sampled, logprobs, steps),
    ):
        for (prompt, tokens), own in zip(rows_of(rows), got, strict=True) if rows is not None else ():
            torch.testing.assert_close(
                own[: len(tokens)], alone(plain, prompt, tokens, longest), atol=off, rtol=0
            )


def sample(folder, longest):
    """Return rows sampled across the boundary and their sampling log-probs; none for a model with an unknown
    cache.
    """
    try:
        generator = Generator(ModelSpec(folder, longest=longest))
    except PlanError as refused:
        if refused.problems[0].code != "no-cache":
            raise
        return None, None
    prompts = Batch.of(prompt_tokens=[prompt[: longest - STEPS[longest]] for prompt in PROMPTS[longest]])
    batch = generator.generate(prompts, Sampling(samples=2, max_tokens=STEPS[longest]), range(6))
    return batch | prompts, batch["sampled_logprobs"]


@pytest.mark.parametrize("longest", [SHORT, LONG])
@pytest.mark.parametrize(("name", "rope"), [("phi3", "longrope"), ("llama", "dynamic")])
def test_rows_on_both_sides_of_the_rotary_boundary_are_independent(folders, tmp_path, name, rope, longest):
    check_rows(saved(model(ropes(name)[rope]), tmp_path, folders["gpt2"]), longest, 1e-5)


def test_a_row_beyond_the_chosen_frequencies_is_refused(folders, tmp_path):
    folder = saved(model(ropes("phi3")["longrope"]), tmp_path, folders["gpt2"])
    trainer, generator = (
        Trainer(ModelSpec(folder, longest=SHORT)),
        Generator(ModelSpec(folder, longest=SHORT)),
    )
    trainer.forward(Batch.of(prompt_tokens=[[3] * BOUNDARY], tokens=[[]]))
    with pytest.raises(
        PlanError,
        match=rf"a row of {BOUNDARY + 1} tokens\n.*at most {BOUNDARY}.*\n.*--longest-row {BOUNDARY + 1}",
    ):
        trainer.forward(Batch.of(prompt_tokens=[[3] * BOUNDARY], tokens=[[4]]))
    with pytest.raises(PlanError, match="frequencies for shorter rows"):
        generator.generate(Batch.of(prompt_tokens=[[3] * BOUNDARY]), Sampling(max_tokens=1), [0])


def test_a_model_is_saved_with_the_frequencies_of_its_folder(folders, tmp_path):
    config = ropes("phimoe")["longrope"]
    folder = saved(model(config), tmp_path / "before", folders["gpt2"])
    Trainer(ModelSpec(folder, longest=LONG)).save(tmp_path / "after")
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "after").config.rope_parameters
        == config.rope_parameters
    )


def test_a_model_that_reads_later_tokens_is_refused(folders, tmp_path):
    folder = saved(model(tiny("bert-generation", is_decoder=False)), tmp_path, folders["gpt2"])
    with pytest.raises(PlanError, match="BertGenerationDecoder also reads the tokens after a token"):
        Trainer(ModelSpec(folder))


# Classes that no config of these sizes can make: some parts have fixed sizes, or the config needs more than
# sizes.
NOT_TINY = {
    "blt",
    "cohere_compass_text",
    "dbrx",
    "dots1",
    "emu3",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_assistant",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_assistant",
    "gemma4_unified_text",
    "git",
    "got_ocr2",
    "llama4",
    "longcat_flash",
    "mllama",
    "musicgen",
    "musicgen_melody",
    "phi4_multimodal",
    "prophetnet",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "qwen4_exp_text",
    "reformer",
    "roc_bert",
    "xlnet",
    "xmod",
    "zamba",
    "zamba2",
    "zaya",
}
# Classes that fail here at loading with an error of transformers: a config without attention, a forward that
# needs lengths, and state without a cache.
FAILING = {"kimi_linear", "xlm", "xlstm"}


REFUSED = ("no-backbone", "logits", "not-causal")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # from transformers' own code
@pytest.mark.parametrize("name", NAMES)
def test_every_causal_model_of_transformers_is_exact_or_refused(folders, tmp_path, name, subtests):
    if name in NOT_TINY:
        with pytest.raises(NotTiny):
            ropes(name)
        return
    if name in FAILING:
        pytest.skip("it cannot be loaded")
    configs = ropes(name)
    for rope, config in configs.items():
        for longest in (SHORT, LONG):
            with subtests.test(rope, longest=longest):
                check_model(config, tmp_path / f"{rope}-{longest}", longest, folders["gpt2"])


def check_model(config, folder, longest, tokenizer):
    """Check that the numbers agree or that the model is refused."""
    try:
        made = model(config)
    except NotTiny as reason:  # a class that knows only its own rotations
        pytest.skip(str(reason))
    try:
        check_rows(saved(made, folder, tokenizer), longest, 5e-3, 0.1)
    except PlanError as refused:
        if refused.problems[0].code not in REFUSED:
            raise
