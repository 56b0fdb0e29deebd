"""`rlflow serve`: run servers for passages, rewards and code."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="serve",
    no_args_is_help=True,
    help="Serve a retriever, a reward or a code runner over HTTP, for use by runs.",
)
Host = Annotated[
    str,
    typer.Option("--host", help="the address to listen at; all but loopback require RLFLOW_SERVE_TOKEN"),
]
Port = Annotated[
    int | None,
    typer.Option("--port", help="the port; default: the variable PORT, else 8000", min=1, max=65535),
]


@app.command()
def retrieve(
    corpus: Annotated[
        Path,
        typer.Argument(help="a JSON Lines file of passages: text and title, or contents", show_default=False),
    ],
    topk: Annotated[
        int, typer.Option("--topk", help="passages per query, if the query gives no number", min=1)
    ] = 3,
    encoder: Annotated[
        Path | None,
        typer.Option("--encoder", help="a model folder: rank by its embeddings with faiss instead of BM25"),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = None,
) -> None:
    """Search a corpus: POST /retrieve, in the request format of the clients in verl and SkyRL-gym."""
    from rlflow.services.serving.retrieve import retriever
    from rlflow.services.serving.server import check_host, chosen_port, serve

    check_host(host)
    number = chosen_port(port)
    serve(retriever(corpus, encoder, topk), host, number)


@app.command()
def reward(
    rewards: Annotated[
        list[str],
        typer.Option(
            "--reward",
            help="task (compares the answer exactly), math, FILE.py:function or a model "
            "folder or a model on the Hub, each with an optional :weight; several are summed",
        ),
    ],
    timeout: Annotated[
        float, typer.Option("--timeout", help="most seconds that a reward function may take for a row")
    ] = 60.0,
    workers: Annotated[
        int | None, typer.Option("--workers", help="most processes of reward functions", min=1)
    ] = None,
    network: Annotated[
        bool, typer.Option("--network", help="whether reward functions may reach the network")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="the device of reward models: cpu or cuda")] = "cpu",
    host: Host = "127.0.0.1",
    port: Port = None,
) -> None:
    """Score rows: POST /get_reward, in the request format of OpenRLHF's remote reward models and of --reward
    URL."""
    from rlflow.config.hub_values import resolve_hub_names
    from rlflow.data.hub import complete_model
    from rlflow.rewards.confinement import Confinement
    from rlflow.rewards.reward_pool import RewardPool
    from rlflow.rewards.reward_spec import parse_reward
    from rlflow.services.serving.reward_server import ServedRewards, reward_application
    from rlflow.services.serving.server import check_host, chosen_port, serve

    check_host(host)
    resolved = resolve_hub_names({"reward": tuple(rewards)})
    for name in resolved.models.values():
        complete_model(name)
    number, specs = chosen_port(port), [parse_reward(each) for each in resolved.local["reward"]]
    with closing(RewardPool(workers, Confinement(network=network))) as pool:
        served = ServedRewards(specs, pool, timeout, device)
        serve(reward_application(served, [spec.name for spec in specs]), host, number)


@app.command()
def code(
    parallel: Annotated[
        int, typer.Option("--parallel", help="most programs that run at the same time", min=1)
    ] = os.cpu_count() or 1,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="run code even if this machine cannot sandbox it")
    ] = False,
    host: Host = "127.0.0.1",
    port: Port = None,
) -> None:
    """Run untrusted Python code: POST /run_code, in SandboxFusion's format, in the same sandbox as reward
    functions."""
    from rlflow.services.serving.code import runner
    from rlflow.services.serving.server import check_host, chosen_port, serve

    check_host(host)
    number = chosen_port(port)
    serve(runner(parallel, unsafe), host, number)
