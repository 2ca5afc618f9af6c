"""What rank 0 shows and leaves behind: the progress bar, the closing tables, summary.json and curves.png.

Called by `loop.py`. Every loss here is in bits per byte.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from torch import Tensor

from .config import TrainConfig

# The loss on the bar is a mean over so many steps: a single batch jumps.
SMOOTHED_STEPS = 20


class Progress:
    """A bar with loss and speed on a terminal, and a line for every evaluation everywhere; nothing if not enabled."""

    def __init__(self, config: TrainConfig, first_step: int, enabled: bool) -> None:
        self.config, self.first_step, self.enabled = config, first_step, enabled
        self.step = first_step
        self.seconds = 0.0  # in steps after the first one, which compiles
        self._last: float | None = None
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            disable=not enabled,
        )
        waiting = "compiling" if config.compile else "starting"
        self._task = self._bar.add_task(waiting, total=config.steps, completed=first_step, figures="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stepped(self, step: int, history: Mapping[str, list[Any]]) -> None:
        """`step` steps of the run are done."""
        now = time.perf_counter()
        if self._last is not None:
            self.seconds += now - self._last
        self._last = now
        self.step = step
        figures = f"loss {smoothed(history['loss']):.3f} bits/byte  {self.tokens_per_second():,.0f} tokens/s"
        self._bar.update(self._task, completed=step, description="training", figures=figures)

    def evaluated(self, step: int, history: Mapping[str, list[Any]]) -> None:
        """The held-out loss after `step` steps is in the history. The time since the last step is not training time."""
        self._last = time.perf_counter() if self._last is not None else None
        if self.enabled:
            train = f"train {smoothed(history['loss']):.3f}  " if history["loss"] else ""
            speed = f"  {self.tokens_per_second():,.0f} tokens/s" if self.seconds else ""
            loss = history["held_out"][-1][1]
            self._bar.console.print(
                f"step {step:>5}/{self.config.steps}  {train}held-out {loss:.3f} bits/byte{speed}", highlight=False
            )

    def tokens_per_second(self) -> float:
        """Tokens of all ranks a second, over the training steps after this process's first; 0 if there are none."""
        steps = self.step - self.first_step - 1
        return steps * self.config.batch * self.config.seq / self.seconds if self.seconds else 0.0


def smoothed(losses: list[float]) -> float:
    """Mean of the last SMOOTHED_STEPS losses."""
    last = losses[-SMOOTHED_STEPS:]
    return sum(last) / len(last)


def load_statistics(loads: Tensor) -> list[dict[str, float]]:
    """Shares, entropy and experts without a route for each layer of `loads` [layers, E], routes by expert."""
    statistics = []
    for load in loads.double():
        share = load / load.sum().clamp(min=1)
        used = share[share > 0]
        statistics.append(
            {
                "min_share": share.min().item(),
                "max_share": share.max().item(),
                "mean_share": share.mean().item(),
                "entropy_bits": -(used * used.log2()).sum().item() + 0.0,
                "dead_experts": int((load == 0).sum()),
            }
        )
    return statistics


def write_report(
    config: TrainConfig,
    history: Mapping[str, list[Any]],
    loads: Tensor,
    order0: float,
    seconds: float,
    tokens_per_second: float,
) -> None:
    """Prints the closing tables and writes summary.json and curves.png into `config.out`.

    Args:
        loads: [layers, E] routes by expert over the held-out text.
        order0: entropy of the held-out bytes without context, bits per byte.
        seconds: wall time of the run, start of the processes and compilation included (of the continuation only, if
            resumed).
        tokens_per_second: of all ranks.
    """
    out = Path(config.out)
    held_out = history["held_out"][-1][1]
    statistics = load_statistics(loads)
    summary = {
        "heldout_bits_per_byte": held_out,
        "order0_bits_per_byte": order0,
        "train_bits_per_byte": smoothed(history["loss"]),
        "ranks": config.ranks,
        "seconds": seconds,
        "tokens_per_s": tokens_per_second,
        "steps": config.steps,
        "compiled": config.compile,
        "device": config.device,
        "torch": torch.__version__,
        "expert_load": statistics,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot_curves(config, history, loads, order0, out / "curves.png")
    console = Console()
    console.print(_load_table(statistics))
    console.print(
        f"held-out {held_out:.3f} bits/byte; order-0 entropy of the same text {order0:.3f}; "
        f"{order0 - held_out:.3f} below it",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"{config.steps} steps, {config.ranks} rank(s), {seconds:.0f} s, {tokens_per_second:,.0f} tokens/s; "
        f"see {out / 'summary.json'} and {out / 'curves.png'}",
        highlight=False,
        soft_wrap=True,
    )


def _load_table(statistics: list[dict[str, float]]) -> Table:
    table = Table(title="Expert load on the held-out text (share of routes)")
    for heading in ("layer", "min", "mean", "max", "entropy (bits)", "dead experts"):
        table.add_column(heading, justify="right")
    for layer, row in enumerate(statistics):
        shares = (f"{row[key]:.1%}" for key in ("min_share", "mean_share", "max_share"))
        table.add_row(str(layer), *shares, f"{row['entropy_bits']:.2f}", str(row["dead_experts"]))
    return table


def plot_curves(
    config: TrainConfig, history: Mapping[str, list[Any]], loads: Tensor, order0: float, path: Path
) -> None:
    """Losses over steps with the order-0 line, and a heat map of expert shares by layer, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (curves, heat) = plt.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 2), layout="constrained")
    steps = range(1, len(history["loss"]) + 1)
    curves.plot(steps, history["loss"], color="tab:blue", alpha=0.3, linewidth=0.8)
    running = [smoothed(history["loss"][:step]) for step in steps]
    curves.plot(steps, running, color="tab:blue", label=f"train (mean of {SMOOTHED_STEPS} steps)")
    curves.plot(*zip(*history["held_out"], strict=True), color="tab:orange", marker="o", label="held out")
    curves.axhline(order0, color="gray", linestyle="--", label="order-0 entropy of the held-out text")
    curves.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    curves.set_title(f"{config.layers} layers, {config.experts} experts top-{config.top_k}, {config.ranks} rank(s)")
    curves.legend()
    shares = loads / loads.sum(dim=1, keepdim=True).clamp(min=1)
    image = heat.imshow(shares.numpy(), aspect="auto", vmin=0, cmap="viridis")
    heat.set(xlabel="expert", ylabel="layer", title="share of routes, held-out text")
    heat.set_yticks(range(loads.shape[0]))
    figure.colorbar(image, ax=heat)
    figure.savefig(path, dpi=120)
    plt.close(figure)
