"""bench/corpus: what its programs state of themselves is so, at their small sizes."""

from __future__ import annotations

import copy
import importlib
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from .support.storages import Line, Storages, largest, tensors_of

BENCH = Path(__file__).resolve().parents[1] / "bench"
MIB = 2**20

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCH))
    ALL = importlib.import_module("corpus.programs").programs()
    recall = importlib.import_module("corpus.recall")
    ways = importlib.import_module("corpus.ways")
    WAYS = {half: ways.ways(half) for half in ("known", "held_out")}

NAMED = [pytest.param(program, id=f"{half}-{program.name}") for half, program in ALL]
WASTEFUL = [pytest.param(program, id=f"{half}-{program.name}") for half, program in ALL if program.expected]


WRITTEN = [
    pytest.param(program, getattr(WAYS[half][program.name], kind), id=f"{half}-{program.name}-{kind}")
    for half, program in ALL
    if program.name in WAYS[half]
    for kind in ("loop", "vmap", "keops", "op")
    if getattr(WAYS[half][program.name], kind) is not None
]


@dataclass(frozen=True)
class Observed:
    storages: Storages
    results: list[torch.Tensor]
    gradients: list[torch.Tensor]
    argument_bytes: int
    kept_bytes: dict[Line, int]  # of each line, when forward has ended


def observed(program: Any, function: Any, arguments: tuple[Any, ...]) -> Observed:
    with Storages(arguments) as storages:
        results = tensors_of(function(*arguments))
        kept: dict[Line, int] = {}
        for storage in storages.made:
            for line in storage.lines if storage.is_alive else ():
                kept[line] = kept.get(line, 0) + storage.bytes
        if program.backward:
            torch.stack([one.sum() for one in results if one.requires_grad]).sum().backward()
    gradients = [one.grad for one in tensors_of(arguments) if one.grad is not None]
    argument_bytes = sum(
        {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors_of(arguments)}.values()
    )
    return Observed(storages, results, gradients, argument_bytes, kept)


def arguments_of(program: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return program.arguments(**program.small)


def test_names_are_unique() -> None:
    names = [(half, program.name) for half, program in ALL]
    assert len(names) == len(set(names))


def test_programs_state_what_they_are() -> None:
    for half, program in ALL:
        assert program.source.startswith("https://"), program.name
        assert program.sizes.keys() == program.small.keys(), program.name
        assert bool(program.expected) == (program.mended is not None), f"{half}: {program.name}"
        for expected in program.expected:
            recall.line_of(program, expected)
            for sizes in (program.sizes, program.small):
                assert expected.now(sizes) > expected.after(sizes), program.name


@pytest.mark.slow
@pytest.mark.parametrize("program", NAMED)
def test_bytes_of_its_lines(program: Any) -> None:
    seen = observed(program, program.run, arguments_of(program))
    took = seen.storages.peak_bytes + seen.argument_bytes
    assert 20 * MIB <= took <= 600 * MIB
    for expected in program.expected:
        line = recall.line_of(program, expected)
        made = max((one.bytes for one in seen.storages.made_by(line)), default=0)
        assert expected.now(program.small) in (made, seen.kept_bytes.get(line))


@pytest.mark.slow
@pytest.mark.parametrize("program", WASTEFUL)
def test_mended(program: Any) -> None:
    arguments = arguments_of(program)
    now = observed(program, program.run, copy.deepcopy(arguments))
    mended = observed(program, program.mended, copy.deepcopy(arguments))
    assert len(now.results) == len(mended.results)
    assert len(now.gradients) == len(mended.gradients)
    assert bool(now.gradients) == program.backward
    for one, other in zip((*mended.results, *mended.gradients), (*now.results, *now.gradients), strict=True):
        scale = float(other.detach().abs().max().clamp(min=1e-6)) if other.is_floating_point() else 0
        torch.testing.assert_close(one, other, rtol=2e-2 if other.dtype.itemsize == 2 else 1e-3, atol=1e-4 * scale)
    returned = max(largest(mended.results), largest(mended.gradients))
    after = max(expected.after(program.small) for expected in program.expected)
    assert max(one.bytes for one in mended.storages.made) <= max(after, returned)


def test_each_wasteful_program_has_ways() -> None:
    wasteful = {half: {one.name for own, one in ALL if own == half and one.expected} for half in WAYS}
    assert {half: set(own) for half, own in WAYS.items()} == wasteful
    every = [one for own in WAYS.values() for one in own.values()]
    assert all(one.loop is not None or one.mended == "loop" for one in every)
    assert sum(one.vmap is not None for one in every) >= 12
    assert sum(one.keops is not None for one in every) >= 4
    assert sum(one.op is not None for one in every) >= 8


class Dense:
    """A LazyTensor of KeOps that holds all pairs: its reductions keep the last axis, and it compiles nothing."""

    def __init__(self, pairs: torch.Tensor) -> None:
        self.pairs = pairs

    def __neg__(self) -> Dense:
        return Dense(-self.pairs)

    def __sub__(self, other: Dense) -> Dense:
        return Dense(self.pairs - other.pairs)

    def __rmul__(self, number: float) -> Dense:
        return Dense(number * self.pairs)

    def __truediv__(self, other: Any) -> Dense:
        return Dense(self.pairs / getattr(other, "pairs", other))

    def __pow__(self, power: int) -> Dense:
        return Dense(self.pairs**power)

    def __matmul__(self, values: torch.Tensor) -> torch.Tensor:
        return self.pairs.squeeze(-1) @ values

    def __getattr__(self, name: str) -> Any:  # abs, exp, sqrt
        return lambda: Dense(getattr(self.pairs, name)())

    def sum(self, axis: int) -> Dense:
        assert axis == -1
        return Dense(self.pairs.sum(-1, keepdim=True))

    def logsumexp(self, dim: int) -> torch.Tensor:
        return self.pairs.logsumexp(dim)

    def argmin(self, dim: int) -> torch.Tensor:
        return self.pairs.argmin(dim)

    def Kmin(self, K: int, dim: int) -> torch.Tensor:  # noqa: N802, as KeOps names them
        return self.pairs.squeeze(-1).topk(K, dim, largest=False).values

    def argKmin(self, K: int, dim: int) -> torch.Tensor:  # noqa: N802
        return self.pairs.squeeze(-1).topk(K, dim, largest=False).indices


@pytest.mark.slow
@pytest.mark.parametrize(("program", "way"), WRITTEN)
def test_ways(program: Any, way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """KeOps compiles each formula for a minute, so that all pairs stand in for it. `bench/corpus.py` runs KeOps."""
    stand_in = types.ModuleType("pykeops.torch")
    stand_in.LazyTensor = Dense  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pykeops", types.ModuleType("pykeops"))
    monkeypatch.setitem(sys.modules, "pykeops.torch", stand_in)
    arguments = arguments_of(program)
    own = ways.outcome(program, arguments)
    assert ways.differences(ways.outcome(replace(program, run=way), arguments), own) == ""
