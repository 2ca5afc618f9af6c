"""Text to batches: reads the text, keeps one copy of every paragraph, splits it, and draws batches by step number.

First stage of a training run; `launch.py` loads the text once to check it, `loop.py` loads it on every rank. A batch is
a function of (text, seed, step) only, so a resumed run sees the same data and every rank agrees on the global batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .config import ArgumentError

# The text is cut into blocks; one block of each group of HELD_OUT_PERIOD, at HELD_OUT_PLACE, is never trained on.
# Blocks spread over the text give a held-out part of the same kind as the rest.
HELD_OUT_PERIOD = 12
HELD_OUT_PLACE = 6
BLOCK_BYTES = 4096

# Only paragraphs of this length are compared: shorter ones ("Examples:") repeat legitimately.
MIN_REPEATED_PARAGRAPH = 80

IGNORED_TARGET = -100


@dataclass(frozen=True)
class Corpus:
    """Bytes of the two parts: `train` [n] and `held_out` [m], uint8; `sha256` of the text that both came from."""

    train: Tensor
    held_out: Tensor
    sha256: str


def load_corpus(paths: Sequence[str], seq: int) -> Corpus:
    """The files in the given order, or CPython's documentation; raises ArgumentError if unreadable or too short."""
    return split_text(drop_repeated_paragraphs(read_text(paths)), seq)


def read_text(paths: Sequence[str]) -> bytes:
    """The bytes of all files joined by an empty line; without files, `pydoc_data.topics` in the order of its keys."""
    if paths:
        parts = []
        for path in paths:
            try:
                parts.append(Path(path).read_bytes())
            except OSError as error:
                raise ArgumentError("--text", "files that can be read", f"{path} ({error.strerror})") from error
        return b"\n\n".join(parts)
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise ArgumentError("--text", "files, because this Python has no pydoc_data.topics", "none") from error
    return "\n\n".join(topics.topics[key].strip() for key in sorted(topics.topics)).encode()


def drop_repeated_paragraphs(text: bytes) -> bytes:
    """Keeps the first copy of every paragraph, so that no held-out paragraph is also a training paragraph.

    CPython's topics quote each other: without this, two thirds of the held-out text (by 50-byte strings) is in the
    training text word for word, with it one twentieth.
    """
    seen: set[bytes] = set()
    kept = []
    for paragraph in text.split(b"\n\n"):
        if len(paragraph) >= MIN_REPEATED_PARAGRAPH:
            if paragraph in seen:
                continue
            seen.add(paragraph)
        kept.append(paragraph)
    return b"\n\n".join(kept)


def split_text(text: bytes, seq: int) -> Corpus:
    """Cuts the text into blocks and deals them out; each part holds at least one window of `seq` + 1 bytes."""
    shortest = HELD_OUT_PERIOD * (seq + 1)
    if len(text) < shortest:
        raise ArgumentError("--text", f"at least {shortest} bytes for --seq {seq}", f"{len(text)} bytes")
    num_blocks = HELD_OUT_PERIOD * max(1, len(text) // (HELD_OUT_PERIOD * max(BLOCK_BYTES, seq + 1)))
    edges = [len(text) * i // num_blocks for i in range(num_blocks + 1)]
    train, held_out = bytearray(), bytearray()
    for i in range(num_blocks):
        part = held_out if i % HELD_OUT_PERIOD == HELD_OUT_PLACE else train
        part += text[edges[i] : edges[i + 1]]
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8),
        held_out=torch.frombuffer(held_out, dtype=torch.uint8),
        sha256=hashlib.sha256(text).hexdigest(),
    )


def order0_entropy(text_N: Tensor) -> float:
    """Shannon entropy of the byte frequencies, bits per byte: what the best model without context would reach here."""
    share = torch.bincount(text_N.long(), minlength=256).double() / text_N.numel()
    share = share[share > 0]
    return -(share * share.log2()).sum().item()


def training_batch(corpus: Corpus, step: int, seed: int, batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step over all ranks, int64 [batch, seq] each: windows at random places of the text."""
    # The CPU generator takes 32 bits of its seed, so both numbers are mixed into these.
    mixed = hashlib.sha256(f"{seed}/{step}".encode()).digest()[:4]
    generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little"))
    starts = torch.randint(corpus.train.numel() - seq, (batch,), generator=generator)
    windows = corpus.train[starts[:, None] + torch.arange(seq + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def held_out_batches(corpus: Corpus, batch: int, seq: int) -> list[tuple[Tensor, Tensor]]:
    """Every held-out byte but the first as a target once, in batches of the training shape.

    The last batch is filled up with text from the start, whose targets are IGNORED_TARGET. Context starts anew in each
    window of `seq` bytes.
    """
    num_targets = corpus.held_out.numel() - 1
    num_batches = math.ceil(num_targets / (batch * seq))
    places = torch.arange(num_batches * batch * seq)
    inputs = corpus.held_out[places % num_targets].long()
    targets = torch.full_like(inputs, IGNORED_TARGET)
    targets[:num_targets] = corpus.held_out[1:].long()
    shape = (num_batches, batch, seq)
    return list(zip(inputs.view(shape).unbind(), targets.view(shape).unbind(), strict=True))


def rank_rows(batch: int, rank: int, ranks: int) -> slice:
    """The sequences of the global batch that belong to `rank`: contiguous, sizes differing by one at most."""
    return slice(batch * rank // ranks, batch * (rank + 1) // ranks)
