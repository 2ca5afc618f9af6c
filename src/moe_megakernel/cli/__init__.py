"""The command line, `moe-megakernel` or `python -m moe_megakernel`: one file a command, put together in `main.py`."""
