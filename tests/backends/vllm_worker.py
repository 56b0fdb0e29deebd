"""What the tests of the vllm backend do with engines, in a process without pytest: ``vllm_worker.py TASK FOLDER SHAPES OUT [RANK]``. What
was found goes to OUT as JSON."""

import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rlflow.backends import vllm
from rlflow.backends.local import Generator, Trainer
from rlflow.backends.local.sampling import truncated
from rlflow.backends.local.tokenizer import load_tokenizer
from rlflow.batch import Batch
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec, Sampling

TEXTS = ["2+2=", "a", "the quick brown fox", "x = y"]
SAMPLINGS = [Sampling(3, 16), Sampling(3, 16, 0.7), Sampling(3, 16, 0.0), Sampling(3, 16, 0.9, 0.8), Sampling(3, 16, 0.8, 0.9, 6)]
SETTINGS = {"kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 64}


def prompts_of(folder, texts=TEXTS):
    return Batch.of(prompt=list(texts), prompt_tokens=[load_tokenizer(folder)(text).input_ids for text in texts])


def split(batch, name="tokens"):
    return torch.split(batch.data[name].value, batch.data[name].lengths.tolist())


def tokens(batch):
    return [row.tolist() for row in split(batch)]


def by_hand(folder, out, prompts, sampling):
    """The largest difference between sampled log-probs and those of a plain forward, truncated as they were."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    worst = 0.0
    for i, (row, sampled) in enumerate(zip(split(out), split(out, "sampled_logprobs"), strict=True)):
        prompt = split(prompts, "prompt_tokens")[i // sampling.samples]
        with torch.no_grad():
            logits = model(torch.cat([prompt, row])[None]).logits[0, len(prompt) - 1 : -1] / (sampling.temperature or 1.0)
        kept = truncated(logits, sampling.top_k, sampling.top_p) if sampling.temperature else logits
        worst = max(worst, float((kept.log_softmax(-1).gather(-1, row[:, None])[:, 0] - sampled).abs().max()))
    return worst


def raised(call):
    try:
        call()
    except (ValueError, PlanError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trained(folder, factor=1.1):
    """A trainer whose weights are not those of the folder."""
    trainer = Trainer(ModelSpec(folder, trained=True))
    with torch.no_grad():
        for parameter in trainer.network.module.parameters():
            parameter.mul_(factor)
    return trainer


def mismatch(trainer, out, prompts):
    return float((trainer.forward(out | prompts)["logprobs"] - out["sampled_logprobs"]).abs().max())


def one(folder):
    """An engine alone in its process."""
    environment, threads = dict(os.environ), torch.set_num_threads
    generator = vllm.Generator(ModelSpec(folder), vllm.Generator.Settings(**SETTINGS))
    left = sorted(name for name in environment.keys() | os.environ.keys() if os.environ.get(name) != environment.get(name))
    prompts, found = prompts_of(folder), {"left": left, "threads": torch.set_num_threads is threads, "healthy": generator.healthy()}
    found["by_hand"] = [by_hand(folder, generator.generate(prompts, sampling, range(12)), prompts, sampling) for sampling in SAMPLINGS]
    found["greedy"] = [tokens(made.generate(prompts, Sampling(1, 12, 0.0), range(4))) for made in (generator, Generator(ModelSpec(folder)))]
    found |= columns(generator, folder, prompts) | alone(generator, prompts) | ends(generator, prompts) | refusals(generator, prompts)
    found |= received(generator, folder, prompts) | under_way(generator, folder, prompts) | broken(generator, prompts)
    return found | {"narrow": raised(lambda: vllm.Generator(ModelSpec(folder.parent / "narrow"))) if folder.name == "qwen3" else ""}


def columns(generator, folder, prompts):
    """What both backends give for the same call, without what they draw."""
    both = [made.generate(prompts, Sampling(3, 5), range(12)) for made in (generator, Generator(ModelSpec(folder)))]
    ours = both[0]
    empty = generator.generate(prompts.rows([]), Sampling(samples=2), [])
    return {
        "kinds": [{name: str(data.kind) for name, data in out.data.items()} for out in both],
        "dtypes": [{name: str(getattr(data.value, "dtype", "")) for name, data in out.data.items()} for out in both],
        "group": [out["group"].tolist() for out in both], "prompts": (ours | prompts)["prompt"], "empty": len(empty),
        "temperature": [generator.generate(prompts, Sampling(1, 1, t), range(4))["temperature"].tolist() for t in (0.0, 0.5)],
        "text": [load_tokenizer(folder).decode(row, skip_special_tokens=True) for row in tokens(ours)], "completion": ours["completion"],
    }


def alone(generator, prompts):
    seeds = [2**62 + i for i in range(8)]
    together = tokens(generator.generate(prompts, Sampling(2, 24), seeds))
    apart = [tokens(generator.generate(prompts.rows([i // 2]), Sampling(1, 24), [seeds[i]]))[0] for i in range(8)]
    again, other = (tokens(generator.generate(prompts, Sampling(2, 24), numbers)) for numbers in (seeds, range(20, 28)))
    return {"together": together, "apart": apart, "again": again, "other": other}


def ends(generator, prompts):
    """How rows end: by any end-of-sequence token, by their length, by a string."""
    generator.eos = [1, 20, 21]
    free = generator.generate(prompts, Sampling(8, 40), range(32))
    stop = max(free["completion"], key=len)[10:12]
    out = generator.generate(prompts, Sampling(8, 40, stop=(stop, "never there")), range(32))
    generator.eos = [1]
    before, after = ([tokens(batch), batch["finish"], batch["completion"]] for batch in (free, out))
    return {"free": before, "stop": stop, "stopped": after}


def refusals(generator, prompts):
    empty = Batch.of(prompt_tokens=[[5], []])
    weights = dict(trained(generator.spec.folder).weights())
    last = [name for name in weights if "norm" in name or "ln_f" in name][-1]
    found = {
        "empty": raised(lambda: generator.generate(empty, Sampling(), [0, 0])),
        "seeds": raised(lambda: generator.generate(prompts, Sampling(2), [1])),
        "long": raised(lambda: generator.generate(prompts, Sampling(1, 300), range(4))),
        "cold": raised(lambda: generator.generate(prompts, Sampling(1, 3, 0.001), range(4))),
        "unknown": raised(lambda: generator.receive(iter([("nonsense", torch.zeros(1))]), 9)),
        "missing": raised(lambda: generator.receive(((name, x) for name, x in weights.items() if name != last), 9)),
        "misshapen": raised(lambda: generator.receive(((name, torch.zeros(3)) for name in weights), 9)),
    }
    generator.receive(Trainer(ModelSpec(generator.spec.folder)).weights(), 0)
    return {"refusals": found}


def received(generator, folder, prompts):
    """With weights other than those of the folder, and with some written in place."""
    trainer = trained(folder)
    before = generator.generate(prompts, Sampling(1, 8), range(4))
    generator.receive(trainer.weights(), 7)
    after = generator.generate(prompts, Sampling(1, 8), range(4))
    found = {"stale": mismatch(trainer, before, prompts), "fresh": mismatch(trainer, after, prompts),
             "versions": [sorted(set(out.data["policy_version"].value.tolist())) for out in (before, after)]}
    scored = generator.logprobs(after | prompts).data["logprobs"].value
    found["scored"] = float((scored - trainer.forward(after | prompts).data["logprobs"].value).abs().max())
    with generator.writing(8), torch.no_grad():
        for parameter in generator.module.parameters():
            parameter.mul_(1.1)
    written = generator.generate(prompts, Sampling(1, 8), range(4))
    return found | {"written": mismatch(trained(folder, 1.1 * 1.1), written, prompts), "written_version": generator.version}


def under_way(generator, folder, prompts):
    """Weights that come from another thread while rows grow, once each has a token."""
    trainer, longest = trained(folder), []
    generator.eos = []
    step, steps = generator.engine.llm.step, []

    def watched():
        steps.append(1)
        if len(steps) == 6:
            other = threading.Thread(target=lambda: generator.receive(trainer.weights(), 20))
            other.start()
            longest.append(other)
        return step()

    generator.engine.llm.step = watched
    try:
        out = generator.generate(prompts, Sampling(1, 40), range(4))
    finally:
        generator.engine.llm.step = step
    longest[0].join()
    after = generator.generate(prompts, Sampling(1, 8), range(4))
    return {"spans": [row.tolist() for row in split(out, "policy_version")], "settled": mismatch(trainer, after, prompts)}


def broken(generator, prompts):
    """An error in the model's forward, and the call after it."""

    def fails(*_):
        raise ArithmeticError("the third layer is on fire")

    hook = generator.module.register_forward_pre_hook(fails)
    try:
        generator.generate(prompts, Sampling(1, 4), range(4))
        said = ""
    except ArithmeticError as error:
        said = str(error)
    hook.remove()
    return {"broken": said, "mended": generator.healthy()}


def join(rank, meeting):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(meeting), 2), rank=rank, world_size=2, timeout=timedelta(seconds=240))


def engines(folder, rank):
    """Two ranks with an engine each, that sample other rows, and not at the same time."""
    generator = vllm.Generator(ModelSpec(folder), vllm.Generator.Settings(**SETTINGS))
    share, trainer = prompts_of(folder, TEXTS[:3] if rank == 0 else TEXTS[3:]), trained(folder)
    found = {"first": tokens(generator.generate(share, Sampling(2, 16), range(2 * len(share))))}
    picks = [[], [0]] if rank else [[0]]
    found["none"] = [len(generator.generate(share.rows(rows), Sampling(2, 4), range(2 * len(rows)))) for rows in picks]
    generator.receive(trainer.weights(), 3)
    out = generator.generate(share, Sampling(1, 16), range(len(share)))
    summed = torch.ones(1)
    dist.all_reduce(summed)  # the trainer's group is as it was
    return found | {"fresh": mismatch(trainer, out, share), "group": float(summed)}


def shared(folder, rank):
    """Two ranks with one engine."""
    generator = vllm.Generator(ModelSpec(folder), vllm.Generator.Settings(tensor_parallel=2, **SETTINGS))
    prompts, trainer = prompts_of(folder), trained(folder)
    halves = {name: list(p.shape) for name, p in generator.module.named_parameters()}
    found = {"by_hand": [by_hand(folder, generator.generate(prompts, sampling, range(12)), prompts, sampling) for sampling in SAMPLINGS],
             "shapes": halves, "stopped": ends(generator, prompts)["stopped"]}
    found["different"] = raised(lambda: generator.generate(prompts.rows([rank]), Sampling(), [0]))
    generator.receive(trainer.weights(), 3)
    out = generator.generate(prompts, Sampling(1, 16), range(4))
    segments = [name for name in os.listdir("/dev/shm") if generator.engine.seat.run in name]
    return found | {"tokens": tokens(out), "fresh": mismatch(trainer, out, prompts), "segments": segments}


def main(task, folder, shapes, out, rank=None):
    torch.set_num_threads(1)
    arguments = () if rank is None else (int(rank),)
    if rank is not None:
        join(int(rank), Path(out).parent / "meeting")
    act = {"one": one, "engines": engines, "shared": shared}[task]
    found = {shape: act(Path(folder) / shape, *arguments) for shape in shapes.split(",")}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
