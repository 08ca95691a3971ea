"""Log-sparse attention by the C++ library: offsets of several parts, shared keys, and threads."""

import pytest
import torch
from effops.kernels import library

import effops
from effops.reference import error_ratio, gradient_error_ratio, tried_ops

pytestmark = pytest.mark.skipif(library.obstacle() != "", reason=library.obstacle())
SIZES = {  # batch axes of queries and of keys, and L, E, F
    "plain": ((2, 3), (2, 3), 300, 64, 64),
    "shared keys": ((2, 3), (2, 1), 77, 5, 70),
    "shared queries": ((2, 1), (1, 3), 130, 33, 20),
    "one position": ((), (), 1, 4, 4),
    "no features of keys": ((3,), (3,), 5, 0, 3),
    "no entry": ((0, 2), (1, 2), 5, 4, 3),
}
PATTERNS = {
    "doubling": {},
    "local": {"local": 4},
    "restarted": {"local": 3, "restart": 20},
    "several parts": {"local": 150, "restart": 160},
    "scaled": {"scale": -0.3},
}


def with_gradients(sizes, **options):
    queried, keyed, L, E, F = SIZES[sizes]
    generator = torch.Generator().manual_seed(0)
    shapes = (*queried, L, E), (*keyed, L, E), (*keyed, L, F)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    out = effops.log_sparse_attention(*leaves, variant="cpp", **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [one.detach() for one in leaves], out.detach(), dout, torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("sizes", SIZES)
def test_results_and_gradients(sizes, pattern):
    args, out, dout, gradients = with_gradients(sizes, **PATTERNS[pattern])
    op = tried_ops()["log_sparse_attention"]
    if not out.numel():
        assert all((one == 0).all() for one in gradients)
        return
    assert error_ratio(op, args, out, **PATTERNS[pattern]) <= 1
    assert gradient_error_ratio(op, args, dout, gradients, **PATTERNS[pattern]) <= 1


@pytest.mark.parametrize("pattern", ["doubling", "several parts"])
@pytest.mark.parametrize("sizes", ["plain", "shared keys"])
def test_any_number_of_threads_gives_the_same_bits(sizes, pattern):
    count, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            _, out, _, gradients = with_gradients(sizes, **PATTERNS[pattern])
            found.append([out, *gradients])
    finally:
        torch.set_num_threads(count)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_nothing_is_read_that_was_not_written(pattern):
    _, expected, _, gradients = with_gradients("shared keys", **PATTERNS[pattern])
    torch.use_deterministic_algorithms(True)  # fills what is allocated with NaN
    try:
        _, found, _, other = with_gradients("shared keys", **PATTERNS[pattern])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, (expected, *gradients), (found, *other)))


def test_features_that_do_not_lie_one_after_another():
    args = [torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(2)).mT.requires_grad_() for _ in range(3)]
    op = tried_ops()["log_sparse_attention"]
    out = op(*args, variant="cpp")
    dout = torch.randn(out.mT.shape, generator=torch.Generator().manual_seed(3)).mT
    gradients = torch.autograd.grad(out, args, dout)
    assert error_ratio(op, args, out.detach()) <= 1
    assert gradient_error_ratio(op, args, dout, gradients) <= 1


def test_what_it_does_not_take():
    query, key, value = (torch.randn(2, 140, 4) for _ in range(3))
    with pytest.raises(NotImplementedError, match="needs operands of one dtype"):
        effops.log_sparse_attention(query, key, value.double(), variant="cpp")
    narrow = [one.bfloat16() for one in (query, key, value)]
    with pytest.raises(NotImplementedError, match="adds up at most 128 offsets of 16 bits, got 1"):
        effops.log_sparse_attention(*narrow, local=130, variant="cpp")


@pytest.mark.parametrize("size", [100, 1e5])
def test_large_scores_have_the_weights_of_forward(size):
    """Their product was not rounded where the maximum was subtracted, so that weights were off by e^(half an ulp)."""
    generator = torch.Generator().manual_seed(0)
    query, key = (size * torch.randn(8, 5, generator=generator) for _ in range(2))
    value = torch.randn(8, 5, generator=generator, requires_grad=True)
    (found,) = torch.autograd.grad(effops.log_sparse_attention(query, key, value, variant="cpp").sum(), value)
    torch.testing.assert_close(found.sum(), torch.tensor(40.0))
