"""The Triton kernels of squared distances against float64 oracles, interpreted or on a device."""

import math

import pytest
import torch

pytest.importorskip("triton")
from effops.kernels import distances, launch

from .support import (
    DEVICE,
    DTYPES,
    LAYOUTS,
    MARKS,
    arithmetic,
    assert_padding_untouched,
    bf16,
    check_within,
    f32,
    f64,
)

pytestmark = MARKS

# (B, M, N, D): several tiles and tails; row-wise in either role; both; more coordinates than a tile
DISTANCES = [(1, 33, 34, 17), (2, 1, 258, 3), (2, 66, 1, 7), (19, 1, 1, 130)]


class Distances:
    """Operands, the axes `scale` along which the scale varies, and exact results with what rounding may add to each."""

    def __init__(self, shape, dtypes=(f32, f32, f32), scale="nd", layout="padded"):
        self.shape, self.layout = shape, layout
        B, M, N, D = shape
        generator = torch.Generator().manual_seed(0)

        def random(*size):
            return torch.randn(size, generator=generator, dtype=f64)

        sizes = [n if axis in scale else 1 for axis, n in zip("bmnd", shape)]
        operands = random(B, M, D), random(B, N, D), random(*sizes).exp()
        place = LAYOUTS[layout]
        self.operands = [place(t.to(dtype).to(DEVICE)) for t, dtype in zip(operands, dtypes)]
        self.dtype = torch.promote_types(torch.promote_types(*dtypes[:2]), dtypes[2])
        self.dout = place(random(B, M, N).to(self.dtype).to(DEVICE))

    @property
    def expanded(self):
        x, loc, scale = self.operands
        return x, loc, scale.expand(*self.shape[:3], scale.shape[3])

    def forward(self):
        out = LAYOUTS[self.layout](torch.full(self.shape[:3], math.nan, dtype=self.dtype, device=DEVICE))
        distances.forward(*self.expanded, out)
        assert_padding_untouched(out)
        return out

    def backward(self, wanted=(True, True, True)):
        grads = [
            LAYOUTS[self.layout](torch.full(t.shape, math.nan, dtype=t.dtype, device=DEVICE)) if want else None
            for want, t in zip(wanted, self.operands)
        ]
        distances.backward(*self.expanded, self.dout, *grads)
        for grad in grads:
            if grad is not None:
                assert_padding_untouched(grad)
        return grads

    def check(self, wanted=(True, True, True)):
        B, M, N, D = self.shape
        u = arithmetic(*self.operands)
        x, loc, s = (t.double() for t in self.operands)
        s = s.expand(B, M, N, D)
        z = (x.unsqueeze(2) - loc.unsqueeze(1)) / s
        half = z.square().sum(-1) / 2
        W = -(s.log() + 0.5 * math.log(2 * math.pi)).sum(-1)
        out_error = u * ((12 + math.sqrt(D)) * half + 2 * W.abs() + 4 * (W - half).abs())
        check_within("out", self.forward(), W - half, out_error)
        G = self.dout.double().unsqueeze(-1)
        terms = (-G * z / s).unsqueeze(1), (G * z / s).unsqueeze(1), (G * (z * z - 1) / s).unsqueeze(1)
        sizes = terms[0].abs(), terms[1].abs(), (G.abs() * (z * z + 1) / s).unsqueeze(1)
        shapes = (B, 1, M, 1, D), (B, 1, 1, N, D), (self.operands[2].shape[0], 1, *self.operands[2].shape[1:])
        names = "dx", "dloc", "dscale"
        for name, got, term, size, shape in zip(names, self.backward(wanted), terms, sizes, shapes):
            if got is not None:
                exact, summed = term.sum_to_size(shape), size.sum_to_size(shape)
                error = u * (16 + math.sqrt(term.numel() / max(1, exact.numel()))) * summed
                check_within(name, got, exact.view(got.shape), error.view(got.shape))


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("scale", ["", "nd", "bmnd"])
@pytest.mark.parametrize("shape", DISTANCES, ids=str)
def test_distances(shape, scale):
    Distances(shape, scale=scale).check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("scale", ["b", "d", "m", "n", "md", "bd", "mn", "mnd", "bmn", "bm"])
def test_distances_sum_the_gradient_of_a_scale_along_any_axes(scale):
    Distances((3, 4, 5, 6), scale=scale).check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: "-".join(str(dtype)[6:] for dtype in dtypes))
def test_distances_dtypes(dtypes):
    if DEVICE == "cpu" and f64 in dtypes and bf16 in dtypes:
        pytest.skip("the interpreter stores float64 as bf16 wrongly")
    Distances((1, 33, 17, 9), dtypes).check()
    Distances((1, 5, 1, 7), dtypes, scale="md").check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {"batch last"}))
def test_distances_strides(layout):
    operands = Distances((2, 5, 9, 7), scale="bmnd", layout=layout)
    operands.check()
    operands.dout = operands.dout[:1, :, :1].expand_as(operands.dout)
    operands.check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("scale", ["d", "mnd"])
def test_distances_wanted_gradients(scale):
    operands = Distances((2, 3, 4, 5), scale=scale)
    for wanted in range(8):
        operands.check([bool(wanted >> bit & 1) for bit in range(3)])


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 0, 0, 5), (2, 3, 4, 0)], ids=str)
@pytest.mark.parametrize("scale", ["", "nd", "bmnd"])
def test_distances_size_0(shape, scale):
    operands = Distances(shape, scale=scale)
    assert (operands.forward() == 0).all()
    for grad in operands.backward():
        assert (grad == 0).all()


@pytest.mark.parametrize(("shape", "scale"), [((1, 33, 18, 5), "nd"), ((1, 1, 260, 3), "d"), ((65, 1, 1, 4), "d")])
def test_distances_grid_limit_and_parts_do_not_change_the_result(shape, scale, monkeypatch):
    operands = Distances(shape, scale=scale)
    out, grads = operands.forward(), operands.backward()
    monkeypatch.setattr(launch, "MAX_GRID", 2)
    assert torch.equal(operands.forward(), out)
    for got, expected in zip(operands.backward(), grads):
        assert torch.equal(got, expected)
    for busy in 1, 5:
        monkeypatch.setattr(launch, "BUSY", busy)
        operands.check()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("shape", [(1, 33, 18, 9), (1, 33, 1, 9)], ids=str)
@pytest.mark.parametrize("dtype", [f64, f32], ids=str)
def test_near_duplicates_far_from_0(shape, dtype):
    """Their distances and slopes have all digits: a product of matrices would leave none."""
    operands = Distances(shape, (dtype,) * 3, scale="n")
    x, loc, scale = operands.operands
    loc[:] = 1e4 + loc[:, :1]
    x[:] = loc[:, :1] + 1e-2 * x
    x[:, ::3] = loc[:, :1]
    scale *= 1e-2
    operands.check()
    assert (operands.backward()[0][:, ::3] == 0).all()


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("shape", [(2, 33, 17, 5), (2, 9, 1, 5), (2, 1, 9, 5), (19, 1, 1, 5)], ids=str)
def test_distances_of_a_bad_row_stay_alone(shape, bad):
    operands = Distances(shape, scale="bmd")
    expected, (dx, dloc, dscale) = operands.forward(), operands.backward()
    operands.operands[0][0, -1, 4] = bad
    clean = torch.ones(shape[:2], dtype=torch.bool, device=DEVICE)
    clean[0, -1] = False
    out, grads = operands.forward(), operands.backward()
    assert torch.equal(out[clean], expected[clean])
    assert not out[~clean].isfinite().any()
    assert torch.equal(grads[0][clean], dx[clean])
    assert torch.equal(grads[1][1:], dloc[1:])
    assert torch.equal(grads[2][:, :, 0][clean], dscale[:, :, 0][clean])


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan, math.inf])
def test_bad_scales_of_distances_stay_alone(value):
    operands = Distances((1, 3, 35, 5), scale="nd")
    expected, (_, dloc, dscale) = operands.forward(), operands.backward()
    operands.operands[2][0, 0, 33, 2] = value
    out, grads = operands.forward(), operands.backward()
    clean = torch.arange(35, device=DEVICE) != 33
    assert torch.equal(out[:, :, clean], expected[:, :, clean])
    assert not out[:, :, 33].isfinite().any()
    assert torch.equal(grads[1][:, clean], dloc[:, clean])
    assert torch.equal(grads[2][:, :, clean], dscale[:, :, clean])
