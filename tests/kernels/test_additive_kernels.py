"""The Triton kernels of additive scores against float64, interpreted or on a device."""

import math

import pytest
import torch

from effops.reference.additive import exact_gradients, exact_scores
from effops.reference.reference import Bounds

pytest.importorskip("triton")
from effops.kernels import additive

from .support import DEVICE, LAYOUTS, MARKS, assert_padding_untouched, bf16, f16, f32, f64, padded

pytestmark = MARKS

SMALL = (2, 9, 20, 17)
# (B, M, N, D): tiles and tails; row-wise in either role; both; several parts of a sum
SHAPES = [
    (2, 33, 35, 17),
    (1, 3, 70, 9),
    (1, 70, 3, 9),
    (2, 5, 1, 130),
    (3, 1, 9, 40),
    (5, 1, 1, 129),
    (1, 300, 1, 3),
    (1, 1, 300, 3),
    (1, 2, 3, 0),
    (0, 2, 3, 4),
    (2, 0, 3, 4),
    (2, 3, 0, 4),
]


def make(shape, generator, dtypes=(f32, f32, f32), place=padded, scale=1.0):
    B, M, N, D = shape
    return [
        place((scale * torch.randn(size, generator=generator, dtype=f64)).to(DEVICE, dtype))
        for size, dtype in zip(((B, M, D), (B, N, D), (B, D)), dtypes, strict=True)
    ]


def as_pairs(query, key, weight):
    return query.unsqueeze(2), key.unsqueeze(1), weight[:, None, None]


def empty(shape, dtype, place=padded):
    return place(torch.full(shape, math.nan, dtype=dtype, device=DEVICE))


def within(found, value, error):
    if found.dtype == bf16 and DEVICE == "cpu":  # the interpreter truncates
        error = error + value.abs() * 2.0**-8
    return Bounds(value, error, error).error_ratio(found) <= 1


def check_scores(query, key, weight, dtype=f32, place=padded):
    out = empty((len(query), query.shape[1], key.shape[1]), dtype, place)
    additive.scores(query, key, weight, out)
    assert within(out, *exact_scores(*as_pairs(query, key, weight)))
    assert_padding_untouched(out)


def check_backward(query, key, weight, dscore, wanted=(True, True, True), place=padded):
    tensors = query, key, weight
    found = [empty(t.shape, t.dtype, place) if want else None for t, want in zip(tensors, wanted, strict=True)]
    additive.backward(*tensors, dscore, *found)
    expected = exact_gradients(*as_pairs(*tensors), dscore)
    for gradient, (value, error) in zip(found, expected, strict=True):
        if gradient is not None:
            assert within(gradient, value.view(gradient.shape), error.view(gradient.shape))
            assert_padding_untouched(gradient)
    return found


def upstream(shape, generator, dtype=f32, place=padded):
    B, M, N, _ = shape
    return place(torch.randn(B, M, N, generator=generator, dtype=f64).to(DEVICE, dtype))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, dtype, generator):
    tensors = make(shape, generator, (dtype,) * 3)
    check_scores(*tensors, dtype)
    check_backward(*tensors, upstream(shape, generator, dtype))


@pytest.mark.parametrize("dtypes", [(bf16,) * 3, (f16,) * 3, (bf16, f32, f64)], ids=str)
def test_dtypes(dtypes, generator):
    tensors = make(SMALL, generator, dtypes)
    check_scores(*tensors, dtypes[2])
    check_backward(*tensors, upstream(SMALL, generator, dtypes[2]))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "batch last"])
def test_any_strides(layout, generator):
    place = LAYOUTS[layout]
    tensors = make(SMALL, generator, place=place)
    copies = [tensor.clone() for tensor in tensors]
    check_scores(*tensors, place=place)
    check_backward(*tensors, upstream(SMALL, generator, place=place), place=place)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


def test_strides_of_0(generator):
    query, key, weight = make((1, *SMALL[1:]), generator)
    query, weight = query[:, :1].expand(2, 9, 17), weight[:, :1].expand(2, 17)
    tensors = query, key.expand(2, -1, -1), weight
    check_scores(*tensors)
    check_backward(*tensors, upstream(SMALL, generator)[:, :1].expand(2, 9, 20))


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_asked_for(wanted, generator):
    tensors = make(SMALL, generator)
    check_backward(*tensors, upstream(SMALL, generator), wanted)


@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize("size", [1e-30, 1e-4, 10.0, 45.0, 356.0, 1e30, 3.3e38])
def test_values_that_cancel(size, dtype, generator):
    """Products of exponentials of q and k would not do: e^90 is infinite in float32."""
    query, key, weight = make((1, 9, 11, 5), generator, (f64,) * 3)
    query = query.sign() * size
    tensors = [tensor.to(dtype) for tensor in (query, -query[:, :1] + key, weight)]
    check_scores(*tensors, dtype)
    check_backward(*tensors, upstream((1, 9, 11, 5), generator, dtype))


@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_values_spoil_no_others(operand, bad, generator):
    tensors = make(SMALL, generator)
    tensors[operand][1, 2, 3] = bad
    out = empty((2, 9, 20), f32)
    additive.scores(*tensors, out)
    value, error = exact_scores(*as_pairs(*tensors))
    assert torch.equal(out.isnan(), value.isnan())
    assert ((out - value).abs() <= error + 1e-6)[~value.isnan()].all()
    dscore = upstream(SMALL, generator)
    found = [empty(tensor.shape, f32) for tensor in tensors]
    additive.backward(*tensors, dscore, *found)
    expected = exact_gradients(*as_pairs(*tensors), dscore)
    for gradient, (value, error) in zip(found, expected, strict=True):
        value, error = value.view(gradient.shape), error.view(gradient.shape)
        assert torch.equal(gradient.isnan(), value.isnan())
        assert ((gradient - value).abs() <= error + 1e-5)[~value.isnan()].all()


def test_deterministic_where_sums_are_split(generator):
    shape = (1, 2, 60, 3)
    tensors, dscore = make(shape, generator), upstream(shape, generator)
    first, second = (check_backward(*tensors, dscore) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
