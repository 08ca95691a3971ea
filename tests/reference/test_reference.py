"""Every op has a reference, which is found by the op alone; what has none is told what to write, and where."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import effops
import effops.dispatch.op
from effops.dispatch.op import Op
from effops.numerics.precision import contraction_error
from effops.ops.densities.power_spherical import density
from effops.reference import reference_of, tried_ops
from effops.reference.power_spherical import BOUNDS
from effops.reference.reference import exact_dot


@pytest.mark.parametrize("name", tried_ops())
def test_every_op_has_a_reference(name: str, generator: torch.Generator) -> None:
    op = tried_ops()[name]
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
    with pytest.raises(ValueError, match="must be an op of effops; got `add`"):
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


def test_rows_of_no_coordinates_have_bounds_in_low_precision() -> None:
    """The rounding of operands, in proportion to the root of their number, divided by zero."""
    for precision in ("highest", "high", "medium"):
        assert contraction_error(0, torch.float32, precision) <= contraction_error(1, torch.float32, precision)


def test_shares_of_a_mixture_lie_between_0_and_1() -> None:
    """Exponents off by hundreds made bounds infinite, and those of a share of 0 NaN."""
    args = torch.zeros(2), torch.tensor([[30.0], [-20.0]]), torch.full((2, 1), 1e-3), torch.zeros(1)
    call = tried_ops()["normal_mixture_log_prob"].prepare(*args)
    of_weights, *others = reference_of(effops.normal_mixture_log_prob).gradient_bounds(call, torch.ones(()))
    assert all(one.below.isfinite().all() for one in (of_weights, *others))
    assert of_weights.below.max() <= 1.01


def test_errors_of_both_factors_of_a_gradient_add_up() -> None:
    """At the antipode, where the exact slope is 0 and that of a correct result may be the largest one."""
    call = tried_ops()["power_spherical_log_prob"].prepare(torch.tensor([1.0, 0.0]), 1.0, torch.tensor([-1.0, 0.0]))
    ones = torch.ones((), dtype=torch.float64)
    of_loc, *_ = BOUNDS.of_gradients(call, ones, 0.5 * ones)
    assert of_loc.above[0] >= 1.5 / density.floor(torch.float32)
