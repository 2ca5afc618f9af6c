"""`moe-megakernel train`: turns the options into a `TrainConfig` and hands it to `train.launch`.

Defaults stand in `TrainConfig` only. Exit codes: 0 done, 1 a rank failed, 2 a wrong option, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from typer import Option

from moe_megakernel.train.config import DEVICES, DTYPES, TrainConfig, TrainError

_DEFAULT = TrainConfig()


def train(
    text: Annotated[
        list[str] | None,
        Option(
            help="Files to train on; repeat it, or list several after one --text. "
            "Default: the documentation that ships with CPython."
        ),
    ] = None,
    more_text: Annotated[list[str] | None, typer.Argument(metavar="[FILE]...", help="Further files.")] = None,
    out: Annotated[str, Option(help="Folder for summary.json, curves.png and checkpoints.")] = _DEFAULT.out,
    ranks: Annotated[int, Option(help="Expert-parallel processes; each holds a part of the experts.")] = _DEFAULT.ranks,
    device: Annotated[str, Option(help=" or ".join(DEVICES))] = _DEFAULT.device,
    dtype: Annotated[str, Option(help=f"{', '.join(DTYPES)}; bfloat16 is autocast.")] = _DEFAULT.dtype,
    backend: Annotated[str, Option(help="Backend of the layer; see `moe-megakernel doctor`.")] = _DEFAULT.backend,
    compile: Annotated[bool, Option(help="Run the model through torch.compile(fullgraph=True).")] = _DEFAULT.compile,
    steps: Annotated[int, Option(help="Optimizer steps of the whole run.")] = _DEFAULT.steps,
    batch: Annotated[int, Option(help="Sequences in a step, over all ranks.")] = _DEFAULT.batch,
    seq: Annotated[int, Option(help="Bytes in a sequence.")] = _DEFAULT.seq,
    layers: Annotated[int, Option(help="Transformer blocks, each with one MoE layer.")] = _DEFAULT.layers,
    hidden: Annotated[int, Option(help="Width of the model.")] = _DEFAULT.hidden,
    heads: Annotated[int, Option(help="Attention heads.")] = _DEFAULT.heads,
    experts: Annotated[int, Option(help="Experts in each layer, over all ranks.")] = _DEFAULT.experts,
    top_k: Annotated[int, Option(help="Experts for each token.")] = _DEFAULT.top_k,
    expert_width: Annotated[int, Option(help="Inner width of an expert.")] = _DEFAULT.expert_width,
    lr: Annotated[float, Option(help="Peak learning rate; warm-up, then cosine.")] = _DEFAULT.lr,
    seed: Annotated[int, Option(help="Seed of weights and data order.")] = _DEFAULT.seed,
    checkpoint_every: Annotated[
        int, Option(help="Steps between checkpoints; 0 saves the last step only.")
    ] = _DEFAULT.checkpoint_every,
    resume: Annotated[bool, Option("--resume", help="Go on from the latest checkpoint in --out.")] = _DEFAULT.resume,
    threads: Annotated[int, Option(help="CPU threads of each rank.")] = _DEFAULT.threads,
    profile: Annotated[
        bool, Option("--profile", help="Record steps 2 to 5 with torch.profiler; report where their time went.")
    ] = _DEFAULT.profile,
) -> None:
    """Train a small byte-level mixture-of-experts transformer on real text, in expert-parallel processes."""
    given = locals()
    options = {field.name: given[field.name] for field in dataclasses.fields(TrainConfig) if field.name != "text"}
    config = TrainConfig(text=(*(text or ()), *(more_text or ())), **options)
    from moe_megakernel.train.launch import run

    try:
        run(config)
    except TrainError as error:
        typer.echo(error, err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.echo("train: interrupted; all ranks were stopped", err=True)
        raise typer.Exit(130) from None
