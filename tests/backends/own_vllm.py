"""Checks of the vllm generator alone, by number of ranks. Every rank runs them in the process of
``contract.py``.
"""

import importlib
import os
import threading

import pytest
import torch
from sampling_claims import SAMPLINGS, TOLERANCE, Subject, pieces, raised, tokens
from training_claims import Subject as Trained
from transformers import AutoModelForCausalLM, LlamaConfig

from rlflow.author.batch import Batch
from rlflow.backends import vllm
from rlflow.backends.local import Generator as LocalGenerator
from rlflow.backends.local import Trainer
from rlflow.backends.local.tokenizer import copy_tokenizer
from rlflow.backends.vllm.parallel import EngineRank
from rlflow.checkpoints.export import export
from rlflow.checkpoints.model_files import model_files
from rlflow.checkpoints.role_tensors import role_tensors
from rlflow.checkpoints.snapshot import Snapshot, host_copy
from rlflow.checkpoints.writer import Writer
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec, Sampling

SECONDS = 120  # longer than any call here
SMALL = {"kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 64}
KEPT = {}


def subject(ground):
    """Return one engine for all checks of a process. Only the length ends its rows."""
    if not KEPT:
        environment, threads = dict(os.environ), torch.set_num_threads
        KEPT["made"] = Subject(ground, "llama", **SMALL)
        KEPT["left"] = [
            name
            for name in environment.keys() | os.environ.keys()
            if os.environ.get(name) != environment.get(name)
        ]
        KEPT["threads"] = torch.set_num_threads is threads
        KEPT["made"].one.eos = []
    return KEPT["made"]


def the_process_is_unchanged(ground):
    assert subject(ground).one.healthy()
    assert KEPT["threads"]
    assert not [name for name in KEPT["left"] if not name.startswith("VLLM_")]


def unsupported_options_are_refused(ground):
    one = subject(ground)
    assert "expected 0, or from 0.01 to 2" in raised(lambda: one.generate(Sampling(1, 3, 0.001)))
    small_generator = vllm.Generator(
        ModelSpec(ground.models / "llama"), vllm.Generator.Settings(kv_cache_memory_bytes=1 << 20)
    )
    with pytest.raises(
        PlanError,
        match=r"a prompt of 800 tokens and max_tokens 200\n.*at most 896 .*cache "
        r"set.*\n.*kv_cache_memory_b",
    ):
        small_generator.generate(of_lengths([800]), Sampling(1, 200), [0])
    assert len(tokens(small_generator.generate(of_lengths([800] * 3), Sampling(2, 96), range(6)))) == 6


def a_model_without_kernels_is_refused(ground):
    """Refused before any sampling: heads of 8."""
    folder = ground.folder / "narrow"
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=8,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    copy_tokenizer(ground.models / "llama", folder)
    with pytest.raises(PlanError, match=r"head_dim=8(.|\n)*--ROLE.generator local"):
        vllm.Generator(ModelSpec(folder))


def an_error_reaches_the_caller_and_the_engine_continues(ground):
    one = subject(ground)

    def fails(*_):
        raise ArithmeticError("the third layer is on fire")

    hook = one.one.module.register_forward_pre_hook(fails)
    with pytest.raises(ArithmeticError, match="the third layer is on fire"):
        one.generate(Sampling(1, 4))
    hook.remove()
    assert one.one.healthy()


def of_lengths(lengths):
    chance = torch.Generator().manual_seed(3)
    return Batch.of(prompt_tokens=[torch.randint(3, 60, (length,), generator=chance) for length in lengths])


def rows_match_the_local_generator(ground):
    """Rows agree token by token, also truncated, for prompts read in several steps and for rows that the
    engine preempts and recomputes because the cache is full.
    """
    one, other = subject(ground), LocalGenerator(ModelSpec(ground.models / "llama"))
    one.one.receive(one.trained(1.0).weights(), 1)
    other.eos = []
    cases = [(of_lengths([300, 90, 10]), sampling) for sampling in SAMPLINGS]
    cases += [(of_lengths([2500, 40]), SAMPLINGS[-1]), (of_lengths([300] * 64), Sampling(1, 100))]
    scheduler, put_off = one.one.engine.llm.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda row, *given, **more: (
        put_off.append(row.num_output_tokens) or preempt(row, *given, **more)
    )
    for prompts, sampling in cases:
        found, wanted = (
            each.generate(prompts, sampling, range(len(prompts) * sampling.samples))
            for each in (one.one, other)
        )
        assert tokens(found) == tokens(wanted)
        torch.testing.assert_close(
            found["sampled_logprobs"], wanted["sampled_logprobs"], atol=TOLERANCE, rtol=0
        )
    scheduler._preempt_request = preempt
    assert any(count > 0 for count in put_off)


def weights_written_in_place_are_used(ground):
    one = subject(ground)
    one.one.receive(one.trained(1.0).weights(), 1)
    with one.one.writing(8), torch.no_grad():
        for parameter in one.one.module.parameters():
            parameter.mul_(1.1)
    out = one.generate(Sampling(1, 8))
    assert one.mismatch(one.trained(1.1), out) < TOLERANCE
    assert one.one.version == 8


class At:
    """Run an action in its own thread before the step of this number. The step waits until the action reaches
    ``until``.
    """

    def __init__(self, llm, number, act, until=lambda: True):
        self.llm, self.step, self.left, self.until = llm, llm.step, number, until
        self.other = threading.Thread(target=act)

    def __enter__(self):
        self.llm.step = self.watched
        return self

    def watched(self):
        self.left -= 1
        if self.left == 0:
            self.other.start()
            while not self.until():
                self.other.join(0.001)
        return self.step()

    def __exit__(self, *_):
        self.llm.step = self.step
        self.other.join(SECONDS)
        assert not self.other.is_alive()


def versions(out):
    return [row.tolist() for row in pieces(out, "policy_version")]


def new_weights_between_steps_are_recorded_per_token(ground):
    """Unfinished rows continue with the new weights."""
    one = subject(ground)
    one.one.receive(one.trained(1.0).weights(), 19)
    trainer = one.trained(1.1)
    with At(one.one.engine.llm, 6, lambda: one.one.receive(trainer.weights(), 20)):
        out = one.generate(Sampling(1, 40))
    assert all(row == sorted(row) and set(row) == {19, 20} and len(row) == 40 for row in versions(out))
    assert one.mismatch(trainer, one.generate(Sampling(1, 8))) < TOLERANCE


def weights_arrive_during_a_pause_and_no_row_is_lost(ground):
    """The engine samples nothing until ``resume``. A recomputation gives the tokens that the new weights
    sample after the earlier ones.
    """
    one = subject(ground)
    old, new = one.trained(1.0), one.trained(1.1)
    one.one.receive(old.weights(), 30)
    before = []

    def update():
        one.one.pause(SECONDS)
        before.append(one.one.engine.llm.engine_core.engine_core.scheduler.get_num_unfinished_requests())
        one.one.receive(new.weights(), 31)
        one.one.resume(recompute=True)

    with At(one.one.engine.llm, 9, update):
        out = one.generate(Sampling(2, 40))
    assert before == [8]
    spans = versions(out)
    assert all(row == sorted(row) and set(row) == {30, 31} and len(row) == 40 for row in spans)
    check_versions(out, out | one.prompts, {30: old, 31: new})


def check_versions(out, batch, trainers):
    """Check that each token has the log-prob under the weights of its version."""
    scored = {version: trainer.forward(batch)["logprobs"] for version, trainer in trainers.items()}
    for i, (row, sampled) in enumerate(zip(versions(out), pieces(out, "sampled_logprobs"), strict=True)):
        expected = torch.stack([scored[version][i, t] for t, version in enumerate(row)])
        torch.testing.assert_close(sampled, expected, atol=TOLERANCE, rtol=0)


def weights_that_arrive_during_a_prompt_apply_to_its_response(ground):
    """The prompts take several steps, and some have unfinished rows."""
    one = subject(ground)
    old, new, prompts = one.trained(1.0), one.trained(1.1), of_lengths([40, 1500, 2500, 1800, 900])
    one.one.receive(old.weights(), 50)

    def update():
        one.one.pause(SECONDS)
        one.one.receive(new.weights(), 51)
        one.one.resume(recompute=True)

    with At(one.one.engine.llm, 3, update, lambda: not one.one.engine._going.is_set()):
        out = one.generate(Sampling(3, 12), prompts=prompts)
    spans = versions(out)
    assert [{50, 51}] * 3 + [{51}] * 3 == [set(row) for row in spans[:3] + spans[-3:]]
    check_versions(out, out | prompts, {50: old, 51: new})


def a_pause_without_end_is_reported_to_the_caller(ground):
    """The error comes at the deadline. A pause and a resume with nothing in between change no bit."""
    one = subject(ground)
    straight = one.generate(Sampling(1, 24))

    def hold():
        one.one.pause(SECONDS)
        one.one.resume()

    with At(one.one.engine.llm, 5, hold):
        again = one.generate(Sampling(1, 24))
    assert tokens(again) == tokens(straight)
    assert torch.equal(again["sampled_logprobs"], straight["sampled_logprobs"])
    one.one.pause(0.01)
    with pytest.raises(
        TimeoutError, match=r"found the engine paused past its deadline, expected resume\(\) before it"
    ):
        one.generate(Sampling(1, 4))
    one.one.resume()
    assert one.one.healthy()


# -- two ranks
# ------------------------------------------------------------------------------------------------------------


def an_exported_run_loads_and_gives_the_same_scores(ground):
    """Two fsdp ranks train the model. Two ranks that share an engine and its single key-value head sample
    from it.
    """
    trained, run, folder = (
        Trained(_of(ground, "fsdp"), "one-kv"),
        ground.folder / "run",
        ground.folder / "exported",
    )
    trained.learn(trained.one)
    state = trained.one.state()
    if ground.rank == 0:
        run.mkdir()
        with Writer(run) as writer:
            writer.submit(
                Snapshot(
                    1, role_tensors("actor", host_copy(state)), files=model_files(trained.folder, "actor")
                )
            )
        export(run, folder)
    ground.together(None)
    exported = Subject(ground, str(folder), **SMALL)
    out = exported.generate(Sampling(2, 16))
    plain = Trainer(ModelSpec(folder))
    plain.peers = ground.peers()
    assert exported.mismatch(plain, out) < TOLERANCE
    assert exported.mismatch(trained.one, out) < TOLERANCE
    assert exported.mismatch(trained.reference(), out) > 100 * TOLERANCE
    KEPT["made"] = exported


def _of(ground, name):
    return type(ground)(name, ground.rank, ground.ranks, ground.models, ground.folder, ground.alone)


def adapters_reach_the_engine_merged(ground):
    """The ranks of the trainers share a model."""
    engine = KEPT["made"]
    for version, name in enumerate(("fsdp", "deepspeed"), 2):
        trained = Trained(_of(ground, name), "one-kv", lora=4, lr=1e-2)
        trained.learn(trained.one)
        engine.one.receive(trained.one.weights(), version)
        out = engine.generate(Sampling(2, 16))
        assert engine.mismatch(trained.one, out) < TOLERANCE
        assert engine.mismatch(trained.reference(), out) > 100 * TOLERANCE


def ranks_that_share_an_engine_need_equal_calls(ground):
    one = KEPT["made"]
    assert "found different rows" in raised(
        lambda: one.generate(Sampling(), prompts=one.prompts.rows([ground.rank]))
    )
    assert "expected an engine of one rank" in raised(lambda: one.one.pause(1))
    with pytest.raises(PlanError, match=r"found:    one of ranks \[0, 1\]\n  expected: ranks \[0, 1, 2, 3\]"):
        EngineRank(ground.rank, 4, 4, "of another role").check_group()
    embedding = next(
        p for name, p in one.one.module.named_parameters() if name.endswith("embed_tokens.weight")
    )
    assert len(embedding) == 32
    queue = importlib.import_module("vllm.distributed.parallel_state").get_tp_group().mq_broadcaster
    left = [one.one.engine.seat.run, queue.buffer.shared_memory.name]
    assert not [name for name in os.listdir("/dev/shm") for mark in left if mark in name]
    sockets = [queue.handle.local_subscribe_addr, queue.handle.local_notify_addr] if ground.rank == 0 else []
    assert not any(os.path.exists(address.removeprefix("ipc://")) for address in sockets)
    assert one.one.healthy()


def ranks_with_their_own_engine_sample_other_rows_or_none(ground):
    from vllm.distributed.parallel_state import destroy_model_parallel

    destroy_model_parallel()  # a process has engines of one size only
    generator = vllm.Generator(ModelSpec(ground.models / "qwen3"), vllm.Generator.Settings(**SMALL))
    prompts = KEPT["made"].prompts
    share, none = prompts.rows([0, 1, 2] if ground.rank == 0 else [3]), prompts.rows([])
    assert len(generator.generate(share, Sampling(2, 16), range(2 * len(share)))) == 2 * len(share)
    for picked in (share.rows([0]), share if ground.rank else none):
        assert len(generator.generate(picked, Sampling(2, 4), range(2 * len(picked)))) == 2 * len(picked)
    assert ground.together(ground.rank) == [0, 1]  # the group of all ranks is unchanged


CHECKS = {
    1: {
        check.__name__: check
        for check in (
            the_process_is_unchanged,
            unsupported_options_are_refused,
            a_model_without_kernels_is_refused,
            an_error_reaches_the_caller_and_the_engine_continues,
            rows_match_the_local_generator,
            weights_written_in_place_are_used,
            new_weights_between_steps_are_recorded_per_token,
            weights_arrive_during_a_pause_and_no_row_is_lost,
            weights_that_arrive_during_a_prompt_apply_to_its_response,
            a_pause_without_end_is_reported_to_the_caller,
        )
    },
    2: {
        check.__name__: check
        for check in (
            an_exported_run_loads_and_gives_the_same_scores,
            adapters_reach_the_engine_merged,
            ranks_that_share_an_engine_need_equal_calls,
            ranks_with_their_own_engine_sample_other_rows_or_none,
        )
    },
}
