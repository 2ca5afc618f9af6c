"""Text to batches: nothing held out is trained on, and every batch is a function of seed and step."""

import math

import pytest
import torch

from moe_megakernel.train.config import ArgumentError
from moe_megakernel.train.data import (
    HELD_OUT_PERIOD,
    IGNORED_TARGET,
    Corpus,
    drop_repeated_paragraphs,
    held_out_batches,
    load_corpus,
    order0_entropy,
    rank_rows,
    read_text,
    split_text,
    training_batch,
)


def numbered_text(lines: int) -> bytes:
    """Every line once, so that a line's place tells where it went."""
    return b"".join(b"line %07d\n" % i for i in range(lines))


@pytest.mark.parametrize("lines", [60, 1000, 20_000])
def test_split_deals_out_every_byte_once(lines):
    text = numbered_text(lines)
    corpus = split_text(text, seq=16)
    parts = bytes(corpus.train.tolist()) + bytes(corpus.held_out.tolist())
    assert sorted(parts) == sorted(text)
    assert corpus.held_out.numel() == pytest.approx(len(text) / HELD_OUT_PERIOD, rel=0.01, abs=2)


def test_held_out_lines_are_not_trained_on():
    corpus = split_text(numbered_text(20_000), seq=16)
    train = set(bytes(corpus.train.tolist()).split(b"\n"))
    held_out = set(bytes(corpus.held_out.tolist()).split(b"\n"))
    common = {line for line in train & held_out if len(line) == len("line 0000000")}
    assert not common
    assert len(held_out) > 1000


def test_no_held_out_paragraph_of_the_default_text_is_trained_on():
    corpus = load_corpus((), seq=128)
    train, held_out = bytes(corpus.train.tolist()), bytes(corpus.held_out.tolist())
    paragraphs = [p for p in held_out.split(b"\n\n") if len(p) >= 80]
    assert len(paragraphs) > 50
    # The first and last paragraph of a block may be cut, so a few short rests can coincide; whole ones cannot.
    repeated = [p for p in paragraphs if p in train]
    assert len(repeated) <= len(paragraphs) // 50, repeated


def test_repeated_paragraphs_stay_once_and_short_ones_stay():
    long = b"x" * 80
    assert drop_repeated_paragraphs(b"\n\n".join([long, b"a", long, b"a", long + b"y"])) == b"\n\n".join(
        [long, b"a", b"a", long + b"y"]
    )


def test_default_text_is_english_and_long_enough():
    text = read_text(())
    assert len(text) > 200_000
    assert b'The "with" statement' in text
    assert text == read_text(())


def test_files_are_joined_in_the_given_order(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    assert read_text([str(tmp_path / "b"), str(tmp_path / "a")]) == b"b\n\na"


def test_short_text_is_refused_with_figures():
    with pytest.raises(ArgumentError, match=r"train: --text: expected at least 204 bytes for --seq 16, got 203 bytes"):
        split_text(b"x" * 203, seq=16)
    shortest = split_text(b"x" * 204, seq=16)
    assert shortest.held_out.numel() == 17


def test_order0_entropy():
    assert order0_entropy(torch.tensor([1, 2, 3, 4] * 5, dtype=torch.uint8)) == 2.0
    assert order0_entropy(torch.full((9,), 7, dtype=torch.uint8)) == 0.0
    skewed = torch.tensor([0] * 3 + [255], dtype=torch.uint8)
    assert order0_entropy(skewed) == pytest.approx(0.75 * math.log2(4 / 3) + 0.25 * 2)


def test_batches_depend_on_seed_and_step_only():
    corpus = split_text(numbered_text(1000), seq=16)
    inputs, targets = training_batch(corpus, step=5, seed=1, batch=6, seq=16)
    again, _ = training_batch(corpus, step=5, seed=1, batch=6, seq=16)
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for step, seed in ((6, 1), (5, 2)):
        assert not torch.equal(inputs, training_batch(corpus, step=step, seed=seed, batch=6, seq=16)[0])
    train = bytes(corpus.train.tolist())
    for row, target in zip(inputs, targets, strict=True):
        assert bytes(row.tolist()) + bytes(target[-1:].tolist()) in train


def test_shortest_text_gives_batches():
    corpus = Corpus(torch.arange(17, dtype=torch.uint8), torch.arange(17, dtype=torch.uint8), "")
    inputs, _ = training_batch(corpus, step=0, seed=0, batch=3, seq=16)
    assert inputs.tolist() == [list(range(16))] * 3


@pytest.mark.parametrize("num_bytes", [17, 18, 33, 49, 200])
def test_every_held_out_byte_is_a_target_once(num_bytes):
    held_out = torch.arange(num_bytes, dtype=torch.uint8)
    batches = held_out_batches(Corpus(held_out, held_out, ""), batch=3, seq=16)
    assert {inputs.shape for inputs, _ in batches} == {(3, 16)}
    counted = torch.cat([targets[targets != IGNORED_TARGET] for _, targets in batches])
    assert counted.tolist() == list(range(1, num_bytes))
    for inputs, targets in batches:
        used = targets != IGNORED_TARGET
        assert torch.equal(inputs[used] + 1, targets[used])


@pytest.mark.parametrize(("batch", "ranks"), [(8, 2), (7, 2), (7, 3), (3, 3), (16, 5)])
def test_ranks_share_the_batch_without_gap_or_overlap(batch, ranks):
    rows = [rank_rows(batch, rank, ranks) for rank in range(ranks)]
    assert [i for r in rows for i in range(batch)[r]] == list(range(batch))
    sizes = [r.stop - r.start for r in rows]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
