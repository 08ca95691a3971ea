"""Blocks of 1 KiB and few rows and columns, so that small operands have many."""

import contextlib
from collections.abc import Iterator

import pytest

from effops.blocks import limits

SIZES = {
    **dict.fromkeys(("BLOCK_BYTES", "PAIR_BYTES", "DISTANCE_BYTES", "PRODUCT_BYTES"), 1024),
    **dict.fromkeys(("ADDITIVE_PAIR_BYTES", "ADDITIVE_PIECE_BYTES"), 1024),
    **{"WHOLE_KEYS": 16, "QUERIES": 8, "KEYS": 16},
}


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, size in SIZES.items():
            monkeypatch.setattr(limits, name, size)
        yield
