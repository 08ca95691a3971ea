"""Blocks of 1 KiB and few rows and columns, so that small operands have many."""

import contextlib
import sys
from collections.abc import Iterator

import pytest

SIZES = {
    **dict.fromkeys(("BLOCK_BYTES", "PAIR_BYTES", "PIECE_BYTES", "PRODUCT_BYTES"), 1024),
    **{"WHOLE_KEYS": 16, "QUERIES": 8, "KEYS": 16},
}


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in [module for name, module in sys.modules.items() if name.startswith("effops.")]:
            for name, size in SIZES.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, size)
        yield
