"""Blocks of 1 KiB, so that small operands have many."""

import contextlib
import sys
from collections.abc import Iterator

import pytest

SIZES = ("BLOCK_BYTES", "PAIR_BYTES", "PIECE_BYTES", "PRODUCT_BYTES", "WIDE_BYTES")


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in [module for name, module in sys.modules.items() if name.startswith("effops.")]:
            for name in SIZES:
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, 1024)
        yield
