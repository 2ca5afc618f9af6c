"""What every rank runs: build, resume, step, evaluate, save, report.

Called by `worker.py` with the group of all ranks (None for a run of one). The global batch is fixed by the options and
dealt out to the ranks in contiguous parts, so the losses do not depend on the number of ranks, up to the order of sums.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moe_megakernel

from . import checkpoint
from .config import TrainConfig
from .data import IGNORED_TARGET, Corpus, held_out_batches, load_corpus, order0_entropy, rank_rows, training_batch
from .model import ByteTransformer, expert_parameter_names
from .optimize import clip_gradients, learning_rate, make_optimizer, sum_over_ranks
from .profiled import ProfiledSteps, write_profile
from .report import Progress, write_report

# Evaluations of the held-out text over a run, the last step included; the start adds one.
NUM_EVALUATIONS = 5


def train(config: TrainConfig, rank: int, group: dist.ProcessGroup | None, begun: float | None = None) -> None:
    """One rank's whole run. Rank 0 shows progress and writes summary.json and curves.png into `config.out`.

    `begun` is when the parent started, by `time.time()`, so that the reported seconds are those the user waited.
    """
    begun = time.time() if begun is None else begun
    _make_deterministic(config)
    trainer = Trainer(config, rank, group)
    history = trainer.resume() if config.resume else new_history()
    first = len(history["loss"])
    recorded = ProfiledSteps(config, rank, first)
    with Progress(config, first, enabled=rank == 0) as progress, recorded:
        if first in (0, config.steps):
            loads = trainer.evaluate(first, history)
            progress.evaluated(first, history)
        for step in range(first, config.steps):
            with recorded.step(step):
                history["loss"].append(trainer.step(step))
            progress.stepped(step + 1, history)
            if _is_due(step + 1, config.steps, NUM_EVALUATIONS):
                loads = trainer.evaluate(step + 1, history)
                progress.evaluated(step + 1, history)
            every = config.checkpoint_every or config.steps
            if (step + 1) % every == 0 or step + 1 == config.steps:
                trainer.save(step + 1, history)
    if rank == 0:
        seconds = time.time() - begun
        write_report(config, history, loads, trainer.order0, seconds, progress.tokens_per_second())
        if config.profile and first < config.steps:  # the last checkpoint's barrier: all ranks have written traces
            write_profile(config)


def new_history() -> dict[str, list[Any]]:
    """`loss` of every step and `held_out` as [step, loss], both in bits per byte; goes into checkpoints as JSON."""
    return {"loss": [], "held_out": []}


class Trainer:
    """Model, optimizer and data of one rank. The methods are collective: every rank calls them in the same order."""

    def __init__(self, config: TrainConfig, rank: int, group: dist.ProcessGroup | None) -> None:
        self.config, self.rank, self.group = config, rank, group
        self.device = torch.device(config.device)
        self.corpus: Corpus = load_corpus(config.text, config.seq)
        self.order0 = order0_entropy(self.corpus.held_out)
        self.held_out = held_out_batches(self.corpus, config.batch, config.seq)
        self.rows = rank_rows(config.batch, rank, config.ranks)
        self.experts = [moe_megakernel.expert_range(config.experts, r, config.ranks) for r in range(config.ranks)]

        self.model = ByteTransformer(config, group)
        self.expert_names = expert_parameter_names(self.model)
        dtype = torch.float64 if config.dtype == "float64" else torch.float32
        self.model.to(device=self.device, dtype=dtype)
        named = [(name, p) for name, p in self.model.named_parameters() if p.numel()]
        self.replicated = [p for name, p in named if name not in self.expert_names]
        self.sharded = [p for name, p in named if name in self.expert_names]
        self.optimizer = make_optimizer([p for _, p in named], config.lr)

        if group is not None:
            max_tokens = math.ceil(config.batch / config.ranks) * config.seq
            # Room for the worst routing, all tokens to one rank: a demo must not stop for that.
            moe_megakernel.reserve(
                group, max_tokens=max_tokens, top_k=config.top_k, row_capacity=config.ranks * max_tokens * config.top_k
            )
        forward: Callable[..., Tensor] = self.model
        self.forward = torch.compile(forward, fullgraph=True, dynamic=False) if config.compile else forward

    def step(self, step: int) -> float:
        """One optimizer step on the global batch of `step`; returns its mean loss in bits per byte."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, config.steps, config.lr)
        inputs, targets = training_batch(self.corpus, step, config.seed, config.batch, config.seq)
        nll = self._run(inputs, targets)
        (nll / targets.numel()).backward()
        replicated = [_gradient(p) for p in self.replicated]
        sharded = [_gradient(p) for p in self.sharded]
        total = nll.detach().to(replicated[0].dtype)
        counts = self.model.expert_counts().to(total.dtype)
        sum_over_ranks([*replicated, total, counts], self.group)
        clip_gradients(replicated, sharded, self.group)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.balance_experts(counts)
        return _bits(total.item() / targets.numel())

    def evaluate(self, step: int, history: dict[str, list[Any]]) -> Tensor:
        """Loss over all held-out bytes, appended to the history once a step; returns tokens by expert, [layers, E].

        Gradients are recorded though none is wanted: it is the very graph that trains, so nothing is compiled twice.
        """
        num_targets = 0
        nll = torch.zeros((), dtype=torch.float64, device=self.device)
        loads = torch.zeros(self.config.layers, self.config.experts, dtype=torch.float64, device=self.device)
        for inputs, targets in self.held_out:
            nll += self._run(inputs, targets).detach()
            loads += self.model.expert_counts()
            num_targets += int((targets != IGNORED_TARGET).sum())
        sum_over_ranks([nll, loads], self.group)
        if not history["held_out"] or history["held_out"][-1][0] < step:
            history["held_out"].append([step, _bits(nll.item() / num_targets)])
        return loads.cpu()

    def save(self, step: int, history: dict[str, list[Any]]) -> None:
        """Writes a checkpoint; returns when it is complete on all ranks."""
        state = {
            "step": step,
            "config": self.config.model_and_data(),
            "text_sha256": self.corpus.sha256,
            "history": history,
        }
        folder = checkpoint.folder_of(self.config.out, step)
        checkpoint.save(
            folder,
            state,
            self.model,
            self.optimizer,
            expert_names=self.expert_names,
            experts=self.experts,
            rank=self.rank,
            barrier=self._barrier,
        )

    def resume(self) -> dict[str, list[Any]]:
        """Loads the latest checkpoint and returns its history."""
        folder = checkpoint.find_latest(self.config.out)
        assert folder is not None  # checked by the parent
        experts = self.experts[self.rank]
        return checkpoint.load(folder, self.model, self.optimizer, self.expert_names, experts)["history"]

    def _run(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The model on this rank's rows of a global batch."""
        autocast = self.config.dtype == "bfloat16"
        context = torch.autocast(self.device.type, torch.bfloat16) if autocast else contextlib.nullcontext()
        with context:
            return self.forward(inputs[self.rows].to(self.device), targets[self.rows].to(self.device))

    def _barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _bits(nats: float) -> float:
    return nats / math.log(2)


def _is_due(step: int, steps: int, times: int) -> bool:
    return step * times // steps > (step - 1) * times // steps


def _make_deterministic(config: TrainConfig) -> None:
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Poisoning every fresh tensor is for tests, not for training.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    Path(config.out).mkdir(parents=True, exist_ok=True)
