"""`python -m moe_megakernel`: the same as the `moe-megakernel` command."""

from .cli.main import app

app(prog_name="moe-megakernel")
