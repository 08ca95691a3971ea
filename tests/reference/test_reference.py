"""Every op has a reference, which is found by the op alone; what has none is told what to write, and where."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import effops
import effops.dispatch.op
from effops.dispatch.op import Op, ops
from effops.reference import reference_of
from effops.reference.reference import exact_dot


@pytest.mark.parametrize("name", ops())
def test_every_op_has_a_reference(name: str, generator: torch.Generator) -> None:
    op = ops()[name]
    reference = reference_of(op)
    assert reference.op is op
    assert reference_of(op.function) is reference
    shapes = list(itertools.chain.from_iterable(reference.cases.values()))
    assert any(0 in shape for shape in shapes)
    args = reference.sample_case(next(iter(reference.cases)), generator=generator)
    assert reference.bounds(op.prepare(*args)).value.shape == op.prepare(*args).shape


@pytest.fixture
def nameless() -> Iterator[Op]:
    """An op without a reference."""
    op = Op("without_reference", prepare=lambda a: a, preference=("naive",))
    op.public(lambda a: a)
    yield op
    del effops.dispatch.op._ops[op.name]


def test_a_missing_reference_is_told(nameless: Op) -> None:
    with pytest.raises(LookupError, match=r"write Reference\(without_reference, .* in a module there"):
        reference_of(nameless)
    with pytest.raises(ValueError, match="is no op of effops; choose from"):
        reference_of(torch.add)


def test_no_call_needs_a_reference() -> None:
    """What users call imports none: they do not wait for what only tests, the benchmark and the doctor take."""
    package = Path(effops.__file__).parent
    users = [package / folder for folder in ("reference", "commands")]
    files = [path for path in package.rglob("*.py") if not any(path.is_relative_to(folder) for folder in users)]
    assert len(files) > 20
    assert [path for path in files if "effops.reference" in path.read_text()] == []


def test_exact_products_of_bfloat16_and_float64() -> None:
    """They are computed by NumPy, which has no bfloat16."""
    wide, narrow = torch.randn(2, 5, 7, dtype=torch.float64).unbind()
    narrow = narrow.bfloat16()
    torch.testing.assert_close(exact_dot(narrow, wide), (narrow.double() * wide).sum(-1))
