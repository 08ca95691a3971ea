"""bench/parts/floors.py: the parts of each op's floor, at sizes where they can be counted by hand."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from effops import measure
from effops.reference import tried_ops

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def floors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("parts.floors")


def test_ops_with_a_floor(floors: ModuleType) -> None:
    """Sparse attention has none: its pairs are no product, and few. Nor has a contraction, which may be any one."""
    assert tried_ops().keys() - floors.FORMULAS.keys() == {"log_sparse_attention", "einsum"}


@pytest.mark.parametrize(
    ("name", "sizes", "products", "functions"),
    [
        ("power_spherical_log_prob", {"M": 6, "T": 5, "D": 4}, [(5, 6, 6)], {"log": 180}),
        ("normal_mixture_log_prob", {"N": 7, "M": 5, "D": 3}, [(1, 7, 5)], {"exp": 35}),
        ("attention", {"B": 2, "H": 3, "L": 5, "D": 4}, [(6, 5, 5), (6, 5, 4)], {"exp": 150}),
        ("additive_attention_scores", {"B": 2, "L": 3, "S": 5, "D": 4}, [], {"tanh": 120}),
    ],
)
def test_parts(name: str, sizes: dict[str, int], products: list, functions: dict[str, int], floors: ModuleType) -> None:
    workload = importlib.import_module("parts.expected").Workload(
        tried_ops()[name], sizes, torch.bfloat16, torch.device("cpu"), False
    )
    parts = floors.parts_of(workload, workload.args())
    made = {part: one.work.function(*one.work.args) for part, one in parts.items()}
    assert [tuple(result.shape) for result in made.values() if result.ndim == 3] == products
    counts = {part: one.count * floors.CACHED_NUMEL for part, one in parts.items() if made[part].ndim == 1}
    assert counts == {f"{function} of the floor": count for function, count in functions.items()}
    assert all(result.dtype == torch.float32 for result in made.values())
    timings = dict.fromkeys(parts, measure.Timing(2.0, 2.0, 0.0, 1, 2.0))
    assert floors.total_ms(parts, timings) == pytest.approx(2 * sum(one.count for one in parts.values()))
