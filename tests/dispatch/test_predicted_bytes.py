"""What `explain` predicts is what a call allocates. The calls are those for which it was something else."""

import functools

import pytest
import torch

import effops
from effops.dispatch.op import ops
from effops.measure import Pass, memory
from effops.pytorch.prediction import FakeTensorMode

NUMBERS_BYTES = 64  # of numbers that PyTorch wraps in tensors


def laid_out(shape, strides=None, dtype=torch.float32):
    """Positive numbers of a shape; `strides` are counted in elements, and those of a contiguous tensor if None."""
    if strides is None:
        return torch.rand(shape, dtype=dtype).add_(0.1)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    return torch.rand(elements, dtype=dtype).add_(0.1).as_strided(shape, strides)


def directions(shape, strides=None, dtype=torch.float32):
    """Equal coordinates: all are the direction of the diagonal, in any layout."""
    return laid_out(shape, strides, dtype).fill_(shape[-1] ** -0.5)


def opposite():
    """Points at the antipodes of their mean directions, where PowerSpherical raises the argument of its logarithm."""
    loc = directions((2000, 64))
    return loc, laid_out((2000,)), -loc[:1000].unsqueeze(1)


# What a call got wrong, and how it was made: the op, and its operands.
CALLS = {
    "a normaliser's body": (
        "von_mises_fisher_log_prob",
        lambda: (directions((3, 1, 1, 200)), laid_out((3, 7, 9)), directions((1, 7, 9, 200), (12600, 1800, 200, 1))),
    ),
    "a normaliser's body in a mixture": (
        "von_mises_fisher_mixture_log_prob",
        lambda: (
            laid_out((500, 1, 1), dtype=torch.float16),
            directions((500, 1, 1, 200), dtype=torch.float16),
            laid_out((500, 1, 1), dtype=torch.float16),
            directions((300, 1, 200), dtype=torch.float16),
            -3,
        ),
    ),
    "many concentrations": (
        "von_mises_fisher_log_prob",
        lambda: (directions((3,)), laid_out((20000,)), directions((1, 3))),
    ),
    "matrices that a batched product copies": (
        "broadcast_dot",
        lambda: (laid_out((500, 1, 9, 200)), laid_out((1, 300, 9, 200), (540000, 1800, 1, 9))),
    ),
    "a matrix of two strides": (
        "broadcast_dot",
        lambda: (laid_out((3000, 1, 400))[..., ::2], laid_out((7, 400))[:, ::2]),
    ),
    "an axis of size 2": (
        "power_spherical_mixture_log_prob",
        lambda: (
            laid_out((1, 9, 250)),
            directions((1, 9, 250, 2), (2, 2, 18, 1)),
            laid_out((1666, 9, 1)),
            directions((1666, 9, 1, 2)),
        ),
    ),
    "copies of a batch": (
        "power_spherical_log_prob",
        lambda: (
            directions((40, 1, 2, 200)),
            laid_out((1, 5000, 2)),
            directions((1, 5000, 2, 200), (2000000, 400, 1, 2)),
        ),
    ),
    "scales along rows": (
        "power_spherical_log_prob",
        lambda: (
            directions((6, 1, 700, 40), dtype=torch.bfloat16),
            laid_out((6, 900, 1)),
            directions((6, 900, 1, 40), dtype=torch.bfloat16),
        ),
    ),
    "antipodes": ("power_spherical_log_prob", opposite),
    "doubtful squares of differences": (
        "normal_log_prob",
        lambda: (torch.randn(100, 64) + 1e4, laid_out((100, 64)) * 1e-3, torch.randn(5000, 1, 64) + 1e4),
    ),
    "queries without keys": (
        "attention",
        lambda: (
            *(torch.randn(2, 64, 16) for _ in range(3)),
            torch.ones(64, 64, dtype=torch.bool).tril(-1),
        ),
    ),
    "a narrow value under a diagonal": (
        "attention",
        lambda: (
            torch.randn(2, 700, 64),
            torch.randn(2, 1500, 64),
            torch.randn(2, 1500, 64).bfloat16(),
            None,
            0.0,
            True,
        ),
    ),
    "the last rows of a pattern": (
        "log_sparse_attention",
        lambda: (torch.randn(9, 1666, 200), torch.randn(1666, 200), torch.randn(9, 1666, 9).double()),
    ),
    "integers": ("normal_log_prob", lambda: (torch.randn(900, 8), torch.ones(900, 8).long(), torch.randn(5, 1, 8))),
    "negated memory": (
        "broadcast_dot",
        lambda: (torch.randn(500, 64, dtype=torch.complex64).conj().imag, torch.randn(64)),
    ),
}
CASES = [
    pytest.param(name, variant, id=f"{case}-{variant}")
    for case, (name, _) in CALLS.items()
    for variant in ops()[name].variants
    if variant not in ("compile", "flex", "triton")
    for name in [case]
]


def op_and_arguments(case, needs_grad):
    torch.manual_seed(0)
    name, make = CALLS[case]
    args = make()
    for arg in args:
        if needs_grad and isinstance(arg, torch.Tensor) and arg.is_floating_point():
            arg.requires_grad_()
    return ops()[name], args


@functools.cache
def explained(case, needs_grad):
    """What `explain` says of the variants of a case. It predicts all of them, so that they share it."""
    op, args = op_and_arguments(case, needs_grad)
    return effops.explain(op.name, *args).variants


@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("case", "variant"), CASES)
def test_predicted_bytes_are_the_measured_ones(case, variant, needs_grad):
    report = explained(case, needs_grad)[variant]
    if report.reason:
        pytest.skip(report.reason)
    op, args = op_and_arguments(case, needs_grad)
    warmup = int(variant == "torchscript")  # what PyTorch compiles in the first call
    measured = memory(Pass(lambda *args: op(*args, variant=variant), args), warmup=warmup)
    assert not report.unknown
    for found, expected in (
        (report.output_bytes, measured.output_bytes),
        (report.saved_bytes, measured.saved_bytes),
        (report.temporary_bytes, measured.temporary_bytes),
    ):
        assert abs(found - expected) <= NUMBERS_BYTES, (report, measured)


def test_explain_leaves_nothing_in_the_cache_of_pytorch():
    """Each new shape left some 60 entries in a cache of the process that has no bound."""

    def explained(points):
        loc, x = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1), torch.randn(points, 1, 3)
        with effops.record() as calls:
            effops.power_spherical_log_prob(loc, torch.ones(4), x)
        return effops.explain(effops.power_spherical_log_prob, loc, torch.ones(4), x), calls[0].cost

    explained(5)
    with FakeTensorMode() as mode:  # of a user, whose entries stay
        torch.ones(2, 3) + 1
    before = len(mode.cache)
    for points in range(100, 105):
        explained(points)
    assert len(mode.cache) == before > 0


def test_views_in_inference_mode_are_no_copies():
    """They were counted as operands that the call makes: a view that is made in inference mode has no base."""
    heads = [torch.randn(2, 4, 30, 16) for _ in range(3)]
    expected = effops.explain("attention", *heads, enable_gqa=True).variants
    with torch.inference_mode():
        made, inside = [one + 0 for one in heads], effops.explain("attention", *heads, enable_gqa=True).variants
        assert effops.explain("attention", *made, enable_gqa=True).variants == inside == expected
