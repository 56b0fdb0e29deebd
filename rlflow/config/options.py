"""The run's own keywords. Every field is a flag and a key of a configuration file; its comment is its
help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import ByteSize

from rlflow.compiler.placement import Pools


@dataclass(frozen=True)
class Options:
    """Keywords of `rlflow run`, apart from the algorithm's settings (--hp.NAME) and the backends'
    (--ROLE.NAME)."""

    model: str | None = None  # Hugging Face model folder that model roles start from
    # .jsonl, .parquet, a Hugging Face dataset folder, or a reasoning-gym task; [NAME=]FILE[:weight], repeat
    data: tuple[str, ...] = ()
    # records of the data that no model can be given: stop before the run, or leave them out
    bad_records: Literal["stop", "skip"] = "stop"
    # task, math, file.py:function, a model folder or a URL, each with an optional @source, :weight
    reward: tuple[str, ...] = ()
    # environment of the role that samples: FILE.py:Class or LIBRARY:ID; its settings and bounds: --env.NAME
    env: str | None = None
    prompts: Annotated[int, Ge(1)] = 64  # prompts per iteration
    iterations: Annotated[int, Ge(1)] = 100  # iterations of the algorithm
    held_out: Annotated[int, Ge(0)] = 512  # prompts kept out of training for evaluation
    eval: tuple[str, ...] = ()  # further held-out sets, as NAME=FILE; several: repeat the flag
    # sampled answers to each held-out prompt; from 2: mean@n, pass@k and maj@k too
    eval_samples: Annotated[int, Ge(1)] = 1
    eval_every: Annotated[int, Ge(0)] = 0  # iterations between evaluations; 0 evaluates before and after only
    # iterations between checkpoints; 0 saves at the end and when stopped only
    save_every: Annotated[int, Ge(0)] = 10
    keep: Annotated[int, Ge(1)] = 2  # checkpoints that are kept
    # seconds for a row of a reward function, or a batch of a server with all tries
    reward_timeout: Annotated[float, Gt(0)] = 60.0
    # most processes of reward functions; without, by cores and how long rows wait
    reward_workers: Annotated[int, Ge(1)] | None = None
    # variables that users' rewards and environments see; several: repeat the flag
    reward_env: tuple[str, ...] = ()
    # folders in which these may change files, / for all; several: repeat the flag
    reward_write: tuple[str, ...] = ()
    # whether users' rewards and environments may reach the network, and local sockets
    reward_network: bool = False
    # of each process of these, such as 2GiB; without, three quarters of the machine's
    reward_memory: ByteSize | None = None
    unsafe_scorers: bool = False  # use tasks whose scorers evaluate text where these cannot be isolated
    max_missing: Annotated[float, Ge(0), Le(1)] = 0.5  # share of an iteration's rewards that may be missing
    # factor by which trainer and sampler may differ on a token before the run warns
    max_mismatch: Annotated[float, Gt(1)] = 1.05
    # compare trainer and generator of two backends on fixed tokens every N iterations; 0: never
    canary: Annotated[int, Ge(0)] = 1
    # show first that rewards are learned from; warn: begin in any case
    prove: Literal["auto", "quick", "strict", "warn", "off"] = "auto"
    # stop after N iterations in a row in which an update took no finite step; 0: never
    max_bad: Annotated[int, Ge(0)] = 3
    # serve the run's numbers to Prometheus at this port of loopback
    metrics_port: Annotated[int, Ge(1), Le(65535)] | None = None
    track: tuple[str, ...] = ()  # tensorboard, wandb, mlflow; several: repeat the flag
    # tokens of prompt and response, for models that rotate by it; 0: the longest that can come
    longest_row: Annotated[int, Ge(0)] = 0
    seed: Annotated[int, Ge(0)] = 0  # every draw is derived from it
    out: str = "runs"  # folder that holds run directories
    name: str | None = None  # name of the run's directory; FLOW-N without
    resume: Literal["auto"] | None = None  # auto: go on with the run of --name where there is one
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of the models' arithmetic
    backend: str = "local"  # trainer and generator of every role: local, null, or a dotted module
    # NAME=RANKS,…: on pools of Ray workers; NAME=RANKS@threads: of threads; without, in this process
    pools: Pools | None = None
    # a running Ray to join: auto or HOST:PORT; without, --pools starts one on this machine
    ray_address: str | None = None
    # of ranks on several machines: its name, or a network such as 10.0.0.0/8; without, the route to Ray
    interface: str | None = None
    # use a Ray that asks for no token, and addresses that the whole internet may reach
    insecure: bool = False
    # seconds for which a worker may be silent before it is killed; 0 watches for deaths only
    heartbeat: Annotated[float, Ge(0)] = 15.0
    # seconds to wait for a cluster (30 at least to join it), and for room there, also anew
    wait_for_nodes: Annotated[float, Ge(0)] = 30.0
    load_timeout: Annotated[float, Gt(0)] = 600.0  # seconds that workers may take to load their models
    # copy the models' state in memory every N iterations; 1 on pools, else 0: never
    commit_every: Annotated[int, Ge(0)] | None = None
    # how they reach generators; alltoall: by Ray's store between pools
    weights: Literal["auto", "segment", "alltoall", "gather"] = "auto"
    # compare digests of weights on all ranks every N transfers; 0: never
    verify_every: Annotated[int, Ge(0)] = 16
    # of models on each rank, such as 20GiB: parts that do not fit are moved in and out; without, no limit
    memory: ByteSize | None = None
    staleness: int = 0  # iterations by which the weights that sample may be older than those that train
    # score sampled rows in N chunks while others are still sampled; 1: when all are sampled
    stream: Annotated[int, Ge(1), Le(1024)] = 1
    threads: Annotated[int, Ge(0), Le(1024)] = 0  # torch threads; 0: one per core

    @property
    def copies_every(self) -> int:
        """Iterations between copies of the models' state in memory; 0: there are none. Pools recover from
        them when a worker dies."""
        return self.commit_every if self.commit_every is not None else int(self.pools is not None)
