"""The Triton kernels of attention against float64 formulas, interpreted or on a device."""

import math

import pytest
import torch

pytest.importorskip("triton")
from effops.kernels import attention, attention_tiles, launch

from .support import (
    DEVICE,
    LAYOUTS,
    MARKS,
    arithmetic,
    assert_padding_untouched,
    bf16,
    check_within,
    f16,
    f32,
    f64,
    operand_units,
    padded,
    triton,
)

tl = triton.language

pytestmark = MARKS

# (B, H, M, N, E, V): several tiles and tails; one query; one key; wider than a tile; more keys than queries
SHAPES = [(1, 1, 70, 67, 17, 20), (1, 2, 1, 65, 7, 3), (2, 2, 9, 1, 1, 1), (2, 1, 5, 7, 130, 129), (1, 1, 3, 140, 5, 9)]
RESULTS = "scores", "weights", "sums"


class Attention:
    """Operands, a mask that varies along the axes `along`, and exact results with what rounding may add to each."""

    def __init__(
        self, shape, result="sums", mask=None, along="bhmn", dtypes=(f32,) * 4, diagonal=None, seed=None, p=0.0
    ):
        B, H, M, N, E, V = shape
        self.shape, self.result, self.dtypes = shape, result, dtypes
        generator = torch.Generator().manual_seed(0)

        def random(*size):
            return torch.randn(size, generator=generator, dtype=f64)

        operands = random(B, H, M, E), random(B, H, N, E), random(B, H, N, V)
        self.query, self.key, self.value = (padded(t.to(dt).to(DEVICE)) for t, dt in zip(operands, dtypes))
        size = [n if axis in along else 1 for axis, n in zip("bhmn", shape)]
        self.mask = None
        if mask == "bool":
            self.mask = (random(*size) > -0.5).to(DEVICE)
        elif mask == "float":
            self.mask = padded(random(*size).to(dtypes[3]).to(DEVICE))
        self.arithmetic = f64 if arithmetic(*self.operands) < 2.0**-30 else f32
        self.dout = padded(random(B, H, M, V if result == "sums" else N).to(self.arithmetic).to(DEVICE))
        self.settings = {"scale": 0.3, "diagonal": diagonal, "dropout_p": p, "precision": "highest"}
        self.seed = None if seed is None else torch.tensor([seed], device=DEVICE)

    @property
    def operands(self):
        mask = [] if self.mask is None or self.mask.dtype == torch.bool else [self.mask]
        return [self.query, self.key, *([self.value] if self.result == "sums" else []), *mask]

    @property
    def call(self):
        mask = None if self.mask is None else self.mask.expand(self.shape[:4])
        value = self.value if self.result == "sums" else None
        return attention.AttentionInputs(self.result, self.query, self.key, value, mask, self.seed, **self.settings)

    def forward(self, layout="padded"):
        out = LAYOUTS[layout](torch.full(self.dout.shape, math.nan, dtype=self.arithmetic, device=DEVICE))
        attention.forward(self.call, out)
        assert_padding_untouched(out)
        return out

    def backward(self, wanted=None, layout="padded"):
        """Gradients of query, key, value and mask."""
        operands = self.query, self.key, self.value if self.result == "sums" else None, self.mask
        dtypes = *self.dtypes[:3], self.arithmetic
        present = [t is not None and t.dtype != torch.bool for t in operands]
        grads = [
            LAYOUTS[layout](torch.full(t.shape, math.nan, dtype=f32 if dtype == bf16 else dtype, device=DEVICE))
            if wanted else None
            for t, dtype, wanted in zip(operands, dtypes, map(lambda a, b: a and b, present, wanted or present))
        ]  # fmt: skip
        attention.backward(self.call, self.dout, *grads)
        for grad in grads:
            if grad is not None:
                assert_padding_untouched(grad)
        return grads

    def exact(self, keep=None):
        B, H, M, N, E, V = self.shape
        u = torch.finfo(self.arithmetic).eps / 2
        query, key, value, dout = (t.double() for t in (self.query, self.key, self.value, self.dout))
        scale = self.settings["scale"]
        terms = [8 + math.sqrt(n) for n in (M, N, E, V)]
        products = [term + operand_units(self.settings["precision"]) for term in terms]
        s = query @ key.mT * scale
        s_error = products[2] * u * abs(scale) * (query.abs() @ key.abs().mT)
        present = torch.ones(B, H, M, N, dtype=torch.bool, device=DEVICE)
        if self.settings["diagonal"] is not None:
            present = present.tril(self.settings["diagonal"])
        if self.mask is not None and self.mask.dtype == torch.bool:
            present = present & self.mask
        elif self.mask is not None:
            s = s + self.mask.double()
            s_error = s_error + 2 * u * s.abs().nan_to_num(posinf=0)
        s = s.masked_fill(~present, -math.inf)
        s_error = s_error.masked_fill(s == -math.inf, 0)
        P = s.softmax(-1).nan_to_num()
        maximum = s.amax(-1, keepdim=True) if N else 0
        relative = s_error + 4 * u * (s - maximum).abs().nan_to_num(posinf=0) + terms[1] * u
        P_error = P * (relative + (P * relative).sum(-1, keepdim=True)) + torch.finfo(self.arithmetic).tiny
        keep = 1 if keep is None else keep.double() / (1 - self.settings["dropout_p"])
        if self.result == "scores":
            out, out_error = s, s_error + u * s.abs().nan_to_num(posinf=0)
            ds, ds_error = dout.masked_fill(~present, 0), torch.zeros_like(s)
        else:
            out, out_error = P, P_error
            dP, dP_error = dout, torch.zeros_like(s)
            if self.result == "sums":
                out = P * keep @ value
                out_error = (P_error + products[1] * u * P) * keep @ value.abs()
                dP = dout @ value.mT * keep
                dP_error = products[3] * u * (dout.abs() @ value.abs().mT) * keep
            delta = (P * dP).sum(-1, keepdim=True)
            delta_error = (P_error * dP.abs() + P * (dP_error + terms[1] * u * dP.abs())).sum(-1, keepdim=True)
            ds = P * (dP - delta)
            ds_error = P_error * (dP - delta).abs() + P * (dP_error + delta_error + 4 * u * (dP.abs() + delta.abs()))
        exact = [ds @ key * scale, ds.mT @ query * scale, (P * keep).mT @ dout, ds]
        errors = [
            ((ds_error + products[1] * u * ds.abs()) @ key.abs()) * abs(scale),
            ((ds_error + products[0] * u * ds.abs()).mT @ query.abs()) * abs(scale),
            ((P_error + products[0] * u * P) * keep).mT @ dout.abs(),
            ds_error + sum(terms) * u * ds.abs(),
        ]
        if self.mask is not None:
            exact[3], errors[3] = (t.sum_to_size(self.mask.shape) for t in (exact[3], errors[3]))
        return (out, out_error), list(zip(exact, errors))

    def check(self, wanted=None, keep=None, layout="padded"):
        (exact, error), gradients = self.exact(keep)
        out = self.forward(layout)
        assert torch.equal(out == -math.inf, exact == -math.inf)
        check_within(self.result, out.nan_to_num(neginf=0), exact.nan_to_num(neginf=0), error)
        for name, got, expected in zip(("dquery", "dkey", "dvalue", "dmask"), self.backward(wanted, layout), gradients):
            if got is not None:
                check_within(name, got, *expected)


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.each_value
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("diagonal", [None, 0, 4, -3], ids=["full", "causal", "above", "below"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, diagonal, result):
    Attention(shape, result, diagonal=diagonal).check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("diagonal", [None, 0], ids=["full", "causal"])
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_masks(mask, diagonal, result):
    """Causal rows of the boolean mask have no pair: their weights, their outputs and their gradients are 0."""
    operands = Attention((2, 2, 34, 35, 5, 6), result, mask, diagonal=diagonal)
    if mask == "float":
        operands.mask[0, 1, 2:4, 3:30] = -math.inf
        operands.mask[1, 1, 5] = -math.inf
    operands.check()


@pytest.mark.each_value
@pytest.mark.parametrize("along", ["", "b", "n", "bn", "hm", "hmn", "bmn", "bh"])
@pytest.mark.parametrize("result", RESULTS)
def test_masks_vary_along_some_axes(result, along):
    """The gradient of an additive mask is summed along the others."""
    Attention((2, 2, 66, 35, 3, 4), result, "float", along).check((False, False, False, True))
    Attention((2, 2, 5, 7, 3, 4), result, "bool", along).check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("along", ["", "n", "hm", "bmn"])
def test_gradient_of_a_mask_in_one_sum(along):
    Attention((2, 2, 66, 35, 3, 4), "sums", "float", along, diagonal=0).check((False, False, False, True))


DTYPES = [(f64,) * 4, (bf16,) * 4, (f16,) * 4, (f32, f32, f32, f64), (bf16, bf16, f32, f32), (f16, bf16, f16, bf16)]


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: "-".join(str(dtype)[6:] for dtype in dtypes))
@pytest.mark.parametrize("result", RESULTS)
def test_dtypes(result, dtypes):
    """float64 to its last digits, the scale too."""
    if result != "sums" and dtypes[0] == dtypes[1] != dtypes[2]:
        pytest.skip("differs in the value alone")
    Attention((1, 2, 35, 34, 18, 7), result, "float", "hn", dtypes, diagonal=0).check()


@pytest.mark.parametrize("result", RESULTS)
def test_strides(result):
    operands = Attention((2, 2, 9, 11, 5, 6), result, "float")
    for name in "query", "key", "value", "mask", "dout":
        setattr(operands, name, LAYOUTS["transposed"](getattr(operands, name)))
    operands.check(layout="every other")
    operands.key = operands.key[:, :1].expand_as(operands.key)  # heads in groups
    operands.mask = operands.mask[:1, :, :, :1]
    operands.dout = operands.dout[:1, :, :, :1].expand_as(operands.dout)
    operands.check(layout="transposed")


@pytest.mark.parametrize("result", RESULTS)
def test_wanted_gradients(result):
    operands = Attention((1, 2, 3, 4, 5, 6), result, "float", "hn")
    for wanted in 0, 1, 2, 4, 8, 6, 9:
        operands.check([bool(wanted >> bit & 1) for bit in range(4)])


@pytest.mark.parametrize("axis", range(6), ids="BHMNEV")
@pytest.mark.parametrize("result", RESULTS)
def test_size_0(result, axis):
    shape = [2, 2, 3, 4, 5, 6]
    shape[axis] = 0
    Attention(tuple(shape), result, "float", "bhmn").check()
    for grad in Attention(tuple(shape), result, "float", "n").backward():
        assert grad is None or axis > 3 or (grad == 0).all()


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("shape", [(1, 1, 66, 40, 3, 4), (1, 1, 2, 530, 3, 2)], ids=str)
def test_grid_limit_and_parts_do_not_change_the_result(shape, result, monkeypatch):
    operands = Attention(shape, result, "float", "n", diagonal=0)
    out, grads = operands.forward(), operands.backward()
    monkeypatch.setattr(launch, "MAX_GRID", 2)
    assert torch.equal(operands.forward(), out)
    for got, expected in zip(operands.backward(), grads):
        assert got is expected is None or torch.equal(got, expected)
    for busy in 1, 5:
        monkeypatch.setattr(launch, "BUSY", busy)
        operands.check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("result", ["weights", "sums"])
@pytest.mark.parametrize("order", [1, -1])
def test_spread(result, order):
    """The running maximum moves by 300 from one end to the other."""
    operands = Attention((1, 1, 3, 70, 5, 6), result, "float", "n")
    operands.mask[:] = order * torch.linspace(-300, 0, 70, device=DEVICE)
    operands.check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("result", ["weights", "sums"])
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_bad_query_stays_alone(result, bad):
    operands = Attention((1, 2, 67, 40, 5, 6), result, diagonal=0)
    expected, (dquery, dkey, *_) = operands.forward(), operands.backward()
    operands.query[0, 1, 66, 3] = bad
    out, grads = operands.forward(), operands.backward()
    clean = torch.ones(1, 2, 67, dtype=torch.bool, device=DEVICE)
    clean[0, 1, 66] = False
    assert torch.equal(out[clean], expected[clean])
    assert not out[~clean].isfinite().all()
    assert torch.equal(grads[0][clean], dquery[clean])
    assert torch.equal(grads[1][:, 0], dkey[:, 0])


@pytest.mark.parametrize("result", ["weights", "sums"])
def test_a_row_without_pairs_passes_no_gradient(result):
    """Not even that of an infinite dout."""
    operands = Attention((1, 1, 3, 4, 5, 6), result, "bool", "m")
    operands.mask[:] = True
    operands.mask[:, :, 1] = False
    expected = operands.backward()
    operands.dout[:, :, 1] = math.inf
    assert (operands.forward()[:, :, 1] == 0).all()
    dquery, dkey, *_ = operands.backward()
    assert (dquery[:, :, 1] == 0).all()
    assert torch.equal(dkey, expected[1])


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("result", RESULTS)
def test_precisions(result, precision):
    operands = Attention((1, 1, 40, 70, 64, 64), result)
    operands.settings["precision"] = precision
    operands.check()


def kept(operands):
    """Which pairs dropout keeps, read from a run whose values are the unit vectors."""
    value, dout = operands.value, operands.dout
    B, H, M, N = operands.shape[:4]
    operands.value = torch.eye(N, dtype=value.dtype, device=DEVICE).expand(B, H, N, N)
    operands.dout = dout.new_empty(B, H, M, N)
    mask = operands.forward() != 0
    operands.value, operands.dout = value, dout
    return mask


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize(("p", "dtype"), [(0.25, f32), (0.9, f64)], ids=str)
def test_dropout(p, dtype):
    operands = Attention((2, 2, 17, 35, 3, 18), "sums", "float", "n", (dtype,) * 4, seed=2**40 + 5, p=p)
    keep = kept(operands)
    count, n = keep.sum().item(), keep.numel()
    assert abs(count - n * (1 - p)) < 5 * math.sqrt(n * p * (1 - p))
    operands.check(keep=keep)
    assert torch.equal(kept(operands), keep)
    assert not torch.equal(keep[0, 0], keep[0, 1])
    assert not torch.equal(keep[0], keep[1])
    operands.seed += 2**32
    assert not torch.equal(kept(operands), keep)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_none_or_all(p):
    operands = Attention((1, 1, 3, 4, 5, 6), "sums", seed=7, p=p)
    if p:
        assert (operands.forward() == 0).all()
        for grad in operands.backward()[:3]:
            assert (grad == 0).all()
    else:
        operands.check()


@triton.jit
def _dropped_kernel(seed_ptr, out_ptr, first_row, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    rows = first_row + offs.to(tl.int64)
    ones = tl.full((BLOCK, BLOCK), 1.0, tl.float32)
    tile = attention_tiles.dropped(ones, seed_ptr, rows, offs, BLOCK, 0.5, tl.float32)
    tl.store(out_ptr + offs[:, None] * BLOCK + offs[None, :], tile)


def test_dropout_counts_pairs_in_64_bits():
    """Pairs 2^32 apart are kept or not by themselves, and so are those of two seeds."""
    tiles = []
    for seed, row in (0, 0), (0, 2**27), (0, 2**28), (1, 0):
        tiles.append(torch.empty(32, 32, device=DEVICE))
        _dropped_kernel[(1,)](torch.tensor([seed], device=DEVICE), tiles[-1], row, BLOCK=32)
    for i, first in enumerate(tiles):
        for second in tiles[:i]:
            assert 400 < (first == second).sum() < 624
