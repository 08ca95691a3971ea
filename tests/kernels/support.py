"""What the tests of kernels share: exact values, what rounding may add to them, and operands of any layout."""

import math

import mpmath
import pytest
import torch

triton = pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def has_driver():
    """Whether Triton finds a driver, real or not."""
    try:
        triton.runtime.driver.active.get_current_target()
    except RuntimeError:
        return False
    return True


COMPILED = not triton.knobs.runtime.interpret
MARKS = [
    pytest.mark.skipif(COMPILED and not has_driver(), reason="needs a GPU, or TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, for the infinities and NaNs tested here
]

DTYPES = [(f64, f64, f64), (bf16, bf16, bf16), (f16, f16, f16), (bf16, f32, f32), (f32, f16, bf16), (bf16, bf16, f32)]
DTYPES += [(f16, bf16, f16), (f32, f32, f64), (f64, f32, bf16)]


def log_gamma_ratio_and_derivatives(scale, D):
    """R, W, W' by mpmath, as float64."""
    mpmath.mp.dps = 80
    b = mpmath.mpf(D - 1) / 2
    a = b + mpmath.mpf(scale)
    if mpmath.isnan(a) or a <= 0:
        return math.nan, math.nan, math.nan
    if mpmath.isinf(a):
        return math.inf, math.nan, 0.0  # there is no density
    R = mpmath.loggamma(a + b) - mpmath.loggamma(a)
    return float(R), float(R - b * mpmath.log(4 * mpmath.pi)), float(mpmath.digamma(a + b) - mpmath.digamma(a))


def oracle_w(scale, D):
    """W and W' of a tensor, in float64."""
    values, inverse = scale.double().cpu().unique(return_inverse=True)
    table = torch.tensor([log_gamma_ratio_and_derivatives(v, D)[1:] for v in values.tolist()], dtype=f64)
    return table[inverse].to(scale.device).unbind(-1)


def arithmetic(*tensors):
    """Rounding unit and floor of t."""
    return 2.0**-53 if any(t.dtype == f64 for t in tensors) else 2.0**-24


def rounds_operands(precision):
    """Whether products take their operands in TF32, whose unit is 2**13 that of float32."""
    return precision == "medium" and DEVICE == "cuda" and not torch.version.hip


def operand_units(precision):
    """What rounding, or truncating, the two operands adds to the error of a product, in rounding units of float32."""
    return 2.0**15 if rounds_operands(precision) else 0.0


def contraction_units(D, precision="highest"):
    """The error of a dot product near 1 in rounding units, on the least exact hardware."""
    if rounds_operands(precision):
        return 2**14 * min(2, 1 + 6 / math.sqrt(D))
    return 6 + D / 7 + math.sqrt(D)


def log_half(t, floor):
    """log(t / 2) with t below the floor taken as the floor."""
    t = torch.where(t < floor, floor, t)
    return torch.where(t > 1, torch.log1p((t - 2) / 2), torch.log(t / 2))


def half_ulp(value):
    """Rounding of the result; the interpreter truncates to bf16."""
    eps = torch.finfo(value.dtype).eps
    error = value.double().abs() * eps * (1 if value.dtype == bf16 and DEVICE == "cpu" else 0.5)
    return error + torch.finfo(value.dtype).smallest_normal * eps


def check_within(name, got, exact, error):
    error = error + half_ulp(got)
    ok = (got.double() - exact).abs() <= error
    ratio = ((got.double() - exact).abs() / error).nan_to_num(math.inf)
    worst = max(ratio.flatten().tolist(), default=0.0)
    assert ok.all(), f"{name}: {(~ok).sum()} of {ok.numel()} outside, the worst {worst:.3g} times the budget"


def padded(tensor, value=math.nan):
    """The same values as a view into a larger tensor filled with NaN: reading or writing past an edge shows."""
    base = torch.full([size + 4 for size in tensor.shape], value, dtype=tensor.dtype, device=tensor.device)
    view = base[tuple(slice(2, 2 + size) for size in tensor.shape)]
    view.copy_(tensor)
    return view


def assert_padding_untouched(view):
    base = view._base.clone()
    base.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(math.nan)
    assert base.isnan().all()


LAYOUTS = {
    "padded": padded,
    "transposed": lambda t: padded(t.mT).mT,
    "batch last": lambda t: padded(t.permute(1, 2, 0)).permute(2, 0, 1),
    "every other": lambda t: padded(t.repeat_interleave(2, -1))[..., ::2],
}
