"""The `moe-megakernel` command: collects the sub-commands, each of which lives in a file of its own.

Entry point of the console script and of `python -m moe_megakernel`.
"""

from __future__ import annotations

import typer

from .bench import bench
from .doctor import doctor
from .profile import profile
from .simulate import simulate
from .train import train

app = typer.Typer(
    name="moe-megakernel",
    help="A mixture-of-experts layer behind one torch operator: train a demo, measure it beside its peers, analyse "
    "profiles, inspect this machine, simulate GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(doctor)
app.command()(profile)
app.command()(simulate)
app.command()(bench)
