"""The C++ library: its special functions, its threads, and what is said where it is not there."""

import ctypes
import json
import math
import os
import shutil
import subprocess
import threading
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from effops.kernels import library

import effops
from effops.numerics.special import bessel_ratio, digamma_ratio, log_gamma_ratio, log_vmf_normaliser
from effops.reference import error_ratio, gradient_error_ratio, tried_ops

needs_library = pytest.mark.skipif(library.obstacle() != "", reason=library.obstacle())
SIZES = {  # T, M, N, D: one owner of each batch entry, or two sweeps; blocks that are not whole
    "owners": (20, 3, 70, 5),
    "sweeps": (2, 300, 150, 33),
    "depth": (3, 17, 140, 200),
}


REALS = pytest.mark.parametrize("real", [torch.float32, torch.float64], ids=str)


def arguments(T, M, N, D, real=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def directions(*shape):
        return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1)

    scale = 20 * torch.rand(T, M, generator=generator) + 1
    log_weights = torch.randn(M, generator=generator).log_softmax(-1)
    return [one.to(real) for one in (log_weights, directions(T, M, D), scale, directions(N, T, 1, D))]


def with_gradients(args):
    leaves = [one.clone().requires_grad_() for one in args]
    out = effops.power_spherical_mixture_log_prob(*leaves, variant="cpp")
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def bits(tensors):
    return [tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int64) for tensor in tensors]


def apply(name, values):
    """Overwrite values with those of a special function."""
    function = getattr(library.library(values.dtype)._long, f"effops_{name}")
    function(ctypes.c_void_p(values.data_ptr()), ctypes.c_int64(values.numel()))


def errors_in_ulp(name, exact, values, real):
    found = values.to(real)
    given = found.clone()
    apply(name, found)
    number = np.float32 if real == torch.float32 else np.float64
    with mpmath.workprec(120):
        right = [exact(mpmath.mpf(value)) for value in given.tolist()]
        units = [float(np.spacing(number(abs(value)))) for value in right]
        return [abs(own - value) / unit for own, value, unit in zip(found.tolist(), right, units)]


@needs_library
@REALS
def test_the_logarithm_is_within_an_ulp(real):
    least, most = (-126, 127) if real == torch.float32 else (-1022, 1023)
    steps = torch.linspace(least, most, 4096, dtype=torch.float64).exp2()
    near_one = 1 + torch.linspace(-0.3, 0.42, 4096, dtype=torch.float64)
    assert max(errors_in_ulp("logarithm", mpmath.log, torch.cat([steps, near_one]), real)) < 1


@needs_library
@REALS
def test_the_exponential_is_within_an_ulp_and_half(real):
    least, most = (-104, 88.7) if real == torch.float32 else (-745, 709.7)
    wide, small = (torch.linspace(*ends, dtype=torch.float64) for ends in ((least, most, 8192), (-1e-3, 1e-3, 512)))
    assert max(errors_in_ulp("exponential", mpmath.exp, torch.cat([wide, small]), real)) < 1.5


@needs_library
@REALS
def test_special_values_of_the_special_functions(real):
    given = [math.inf, math.nan, 1.0, -math.inf, -1000.0, 1000.0, 0.0, -0.0] * 2
    for name, expected in (
        ("logarithm", [math.inf, math.nan, 0.0]),
        ("exponential", [math.inf, math.nan, math.e, 0.0, 0.0, math.inf, 1.0, 1.0]),
    ):
        values = torch.tensor(given, dtype=real)
        apply(name, values)
        torch.testing.assert_close(values[: len(expected)], torch.tensor(expected, dtype=real), equal_nan=True)


def power_spherical_normaliser(scale, dimension):
    b = 0.5 * (dimension - 1)
    return log_gamma_ratio(scale, b) - b * math.log(4 * math.pi), digamma_ratio(scale, b)


def vmf_normaliser(scale, dimension):
    return log_vmf_normaliser(scale, dimension), bessel_ratio(scale, dimension)[1]


NORMALISERS = {"power_spherical": power_spherical_normaliser, "von_mises_fisher": vmf_normaliser}


@needs_library
@pytest.mark.parametrize("dimension", [2, 3, 10, 129, 4096])
@pytest.mark.parametrize("name", NORMALISERS)
def test_normalisers_are_rounded_once(name, dimension):
    b = 0.5 * (dimension - 1)
    scale = torch.cat(
        [torch.logspace(-30, 30, 2001), -b * torch.linspace(0.01, 1.5, 40), torch.tensor([0.0, math.nan, math.inf])]
    )
    values, slopes = torch.empty_like(scale), torch.empty_like(scale)
    library.library(torch.float32).normalisers(name, scale, dimension, values, slopes)
    for found, expected in zip((values, slopes), NORMALISERS[name](scale.double(), dimension)):
        assert torch.equal(found.isnan(), expected.isnan())
        is_domain = (scale >= 0) & scale.isfinite()  # others are no concentrations
        torch.testing.assert_close(found.double()[is_domain], expected[is_domain], rtol=2.0**-23, atol=1e-11)


@needs_library
@REALS
@pytest.mark.parametrize("coordinates", [1, 3, 64, 67])
def test_normalisers_of_deviations_are_rounded_once(coordinates, real):
    deviations = torch.logspace(-30, 30, 40 * coordinates, dtype=real).view(coordinates, 40).mT.contiguous()
    deviations[0, 0], deviations[1, -1] = 0, -1
    values = torch.empty(40, dtype=real)
    dimension = 2 * coordinates if coordinates == 1 else coordinates
    library.library(real).normalisers_of_deviations(deviations, dimension, values)
    logarithms = deviations.double().log() + 0.5 * math.log(2 * math.pi)
    expected = -logarithms.sum(-1) * (2 if coordinates == 1 else 1)
    rtol, atol = (2.0**-23, 1e-11) if real == torch.float32 else (2.0**-50, 1e-12)
    torch.testing.assert_close(values.double(), expected, rtol=rtol, atol=atol, equal_nan=True)


@needs_library
def test_few_normalisers_keep_pythons_lock(monkeypatch):
    kernels = library.library(torch.float32)
    monkeypatch.setattr(kernels, "_long", None)  # the one that lets go of the lock
    few, many = torch.ones(library.BRIEF), torch.ones(library.BRIEF + 1)
    kernels.normalisers("power_spherical", few, 3, torch.empty_like(few), None)
    kernels.normalisers_of_deviations(few.view(-1, 1), 3, torch.empty_like(few))
    with pytest.raises(AttributeError):
        kernels.normalisers("power_spherical", many, 3, torch.empty_like(many), None)


@needs_library
@REALS
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_any_number_of_threads_gives_the_same_bits(sizes, real):
    args, count = arguments(*sizes, real), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found.append(bits(with_gradients(args)))
    finally:
        torch.set_num_threads(count)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@needs_library
@REALS
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_nothing_is_read_that_was_not_written(sizes, real):
    args = arguments(*sizes, real)
    expected = bits(with_gradients(args))
    torch.use_deterministic_algorithms(True)  # fills what is allocated with NaN
    try:
        assert torch.empty(1).isnan()
        assert all(map(torch.equal, bits(with_gradients(args)), expected))
    finally:
        torch.use_deterministic_algorithms(False)


@needs_library
def test_callers_at_once():
    args = arguments(*SIZES["owners"])
    expected, found = bits(with_gradients(args)), []
    callers = [threading.Thread(target=lambda: found.append(bits(with_gradients(args)))) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 6
    assert all(all(map(torch.equal, one, expected)) for one in found)


@needs_library
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_computes():
    """A parallel region would wait for threads that are not in it."""
    args = arguments(*SIZES["owners"])
    with torch.no_grad():
        expected = effops.power_spherical_mixture_log_prob(*args, variant="cpp")
        child = os.fork()
        if child == 0:
            found = effops.power_spherical_mixture_log_prob(*args, variant="cpp")
            os._exit(0 if torch.equal(found, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_library
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("is_expanded", [False, True])
def test_weights_of_each_point(sizes, is_expanded):
    log_weights, *others = arguments(*sizes)
    T, M, N, _ = sizes
    log_weights = log_weights.expand(N, T, M)  # with a stride of 0, or without
    if not is_expanded:
        log_weights = log_weights + torch.randn(N, T, 1, generator=torch.Generator().manual_seed(2))
    check(tried_ops()["power_spherical_mixture_log_prob"], [log_weights, *others])


def check(op, leaves):
    """Compare the results of `cpp` and their gradients with float64."""
    out = op(*(leaf.requires_grad_() for leaf in leaves), variant="cpp")
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    gradients = torch.autograd.grad(out, leaves, dout)
    args = [leaf.detach() for leaf in leaves]
    assert error_ratio(op, args, out.detach()) <= 1
    assert gradient_error_ratio(op, args, dout, gradients) <= 1


@needs_library
@REALS
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", ["power_spherical", "von_mises_fisher"])
@pytest.mark.parametrize("varies_along", ["components", "points", "both", "neither"])
def test_scales_may_vary_along_any_axes(name, sizes, varies_along, real):
    T, M, N, _ = sizes
    log_weights, loc, _, x = arguments(*sizes, real)
    shape = {"components": (T, M), "points": (N, T, 1), "both": (N, T, M), "neither": ()}[varies_along]
    scale = 20 * torch.rand(shape, generator=torch.Generator().manual_seed(4), dtype=real) + 1
    if M >= 8:
        check(tried_ops()[f"{name}_log_prob"], [loc, scale, x])
    check(tried_ops()[f"{name}_mixture_log_prob"], [log_weights, loc, scale, x])


@needs_library
@REALS
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("deviations", ["each", "of components", "of coordinates", "one"])
def test_normal_densities_and_dot_products(sizes, deviations, real):
    T, M, N, D = sizes
    log_weights, _, _, _ = arguments(*sizes, real)
    generator = torch.Generator().manual_seed(5)
    loc, x = (torch.randn(*shape, generator=generator, dtype=real) for shape in ((T, M, D), (N, T, 1, D)))
    shape = {"each": (T, M, D), "of components": (M, 1), "of coordinates": (D,), "one": (1,)}[deviations]
    scale = torch.rand(shape, generator=generator, dtype=real) + 0.5
    check(tried_ops()["normal_mixture_log_prob"], [log_weights, loc, scale, x])
    if M >= 8:
        check(tried_ops()["normal_log_prob"], [loc, scale, x])
        check(tried_ops()["broadcast_dot"], [x, loc])


@needs_library
def test_a_point_at_infinity_spoils_no_gradient_of_others():
    """Its share is 0, and 0 times its distance is NaN."""
    generator = torch.Generator().manual_seed(6)
    loc, x = torch.randn(40, 5, generator=generator), torch.randn(30, 1, 5, generator=generator)
    scale, log_weights = torch.ones(40, 1), torch.zeros(40)
    loc[7, 2] = math.inf
    leaves = [one.requires_grad_() for one in (log_weights, loc, scale, x)]
    out = effops.normal_mixture_log_prob(*leaves, variant="cpp")
    dloc, dx = torch.autograd.grad(out.sum(), (loc, x))
    assert all(one.isfinite().all() for one in (out, dloc, dx))
    assert (dloc[7] == 0).all()


@needs_library
@pytest.mark.parametrize("name", ["normal_log_prob", "normal_mixture_log_prob"])
def test_components_in_one_place_with_deviations_of_their_own(name):
    """What was kept of one entry of a batch served the next one, whose components lie at the same address."""
    generator = torch.Generator().manual_seed(8)
    loc, x = torch.randn(9, 4, generator=generator), torch.randn(3, 30, 1, 4, generator=generator)
    scale = torch.rand(3, 1, 9, 4, generator=generator) + 0.3
    log_weights = [torch.zeros(9)] if "mixture" in name else []
    check(tried_ops()[name], [*log_weights, loc.expand(3, 1, 9, 4), scale, x])


@needs_library
def test_a_share_below_the_normal_numbers_is_not_lost():
    """exp(-88) of a share was flushed to 0, which an error budget does not explain."""
    loc = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [0.8, 0.6]]), dim=-1)
    scale = torch.tensor([1.0, 900.0], requires_grad=True)
    log_weights = torch.tensor([0.0, -3.0])
    out = effops.power_spherical_mixture_log_prob(log_weights, loc, scale, loc[:1].unsqueeze(1), variant="cpp")
    (found,) = torch.autograd.grad(out, scale, torch.ones_like(out))
    exact = scale.detach().double().requires_grad_()
    args = log_weights.double(), loc.double(), exact, loc[:1].unsqueeze(1).double()
    (expected,) = torch.autograd.grad(effops.power_spherical_mixture_log_prob(*args).sum(), exact)
    assert 1e-45 < expected[1].abs() < 1e-38
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=2e-45)


@needs_library
@pytest.mark.parametrize("name", ["normal", "von_mises_fisher"])
def test_gradients_that_overflow_only_when_they_are_lifted(name):
    """Gradients of mixtures are computed 2^32 times as large, and again without where that is too much."""
    generator = torch.Generator().manual_seed(0)
    log_weights, scale = torch.zeros(20), torch.rand(20, generator=generator) + 0.5
    loc, x = (
        torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1)
        for shape in [(20, 5), (9, 1, 5)]
    )
    scale = scale[:, None] if name == "normal" else scale
    op = getattr(effops, f"{name}_mixture_log_prob")
    leaves = [one.requires_grad_() for one in (log_weights, loc, scale, x)]
    for size in (1.0, 1e30):
        out = op(*leaves, variant="cpp")
        found = torch.autograd.grad(out, leaves, torch.full_like(out, size))
        exact = [one.detach().double().requires_grad_() for one in leaves]
        expected = torch.autograd.grad(op(*exact, variant="naive").sum() * size, exact)
        for own, right in zip(found, expected):
            assert (own.double() - right).abs().max() < 1e-5 * right.abs().max()


class Elsewhere:
    """A folder in place of the library's own."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        monkeypatch.setattr(library, "FOLDER", folder)

    def obstacle(self):
        library.library.cache_clear()
        try:
            library.library(torch.float32)
        except OSError as error:
            return str(error)
        finally:
            library.library.cache_clear()
        return ""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    return Elsewhere(tmp_path, monkeypatch)


def test_what_is_said_where_no_library_was_built(elsewhere):
    assert elsewhere.obstacle() == "was not built: " + library.LEFT_OUT
    outcome = {"compiler": "c++ 1", "digest": "", "avx2": "it was not found"}
    (elsewhere.folder / library.OUTCOME).write_text(json.dumps(outcome))
    assert elsewhere.obstacle() == "was not built for avx2 by c++ 1: it was not found; " + library.AGAIN


def test_a_library_of_other_sources_is_refused(elsewhere):
    (elsewhere.folder / "mixture.cpp").write_text("// edited")
    (elsewhere.folder / library.OUTCOME).write_text(json.dumps({"digest": "0", "avx2": "", "avx2_float64": ""}))
    assert elsewhere.obstacle() == "was built of other sources than those in kernels/cpp; run pip install -e . again"


def test_a_processor_without_avx2_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert Elsewhere(tmp_path, monkeypatch).obstacle() == "needs a processor with AVX2 or AVX-512, got DEFAULT"


@needs_library
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@REALS
def test_wide_vectors_of_narrow_instructions_give_the_same_bits(tmp_path, monkeypatch, real):
    """So the source of AVX-512 is tested where there is AVX2 alone."""
    args, ending = arguments(*SIZES["sweeps"], real), library.REALS[real]
    sources = sorted(map(str, Path(library.FOLDER).glob("*.cpp")))
    flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-mavx2", "-mfma", "-DVECTOR_BYTES=64"]
    size, wide = f"-DREAL_BYTES={real.itemsize}", tmp_path / f"avx512{ending}.so"
    subprocess.run(["g++", *flags, size, *sources, "-o", str(wide)], check=True)
    shutil.copy(wide, tmp_path / f"avx2{ending}.so")
    own = library.library(real)
    expected = bits(with_gradients(args))
    built = {name + other: "" for name in ("avx2", "avx512") for other in library.REALS.values()}
    (tmp_path / library.OUTCOME).write_text(json.dumps({"digest": "", **built}))
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    library.library.cache_clear()
    try:
        assert library.library(real) is not own
        found = bits(with_gradients(args))
    finally:
        library.library.cache_clear()
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert all(map(torch.equal, found, expected))
    else:
        for one, other in zip(found, expected):
            torch.testing.assert_close(one.view(real), other.view(real))


@needs_library
@pytest.mark.parametrize("mixes", [False, True])
def test_each_coordinate_has_the_gradient_of_one_deviation(mixes):
    """Distances are computed alike whatever gradients are wanted: shares far away magnify what differs."""
    generator = torch.Generator().manual_seed(0)
    x, loc = (torch.randn(*shape, 64, generator=generator, dtype=torch.float64) * 3 for shape in ((20, 1), (9,)))
    scale, weights = torch.full((9, 1), 0.01, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)

    def gradients(dtype, **options):
        leaves = [one.to(dtype).requires_grad_() for one in (x, loc, scale)]
        args = leaves[1], leaves[2].expand(9, 64), leaves[0]
        function = effops.normal_mixture_log_prob if mixes else effops.normal_log_prob
        out = function(*([weights.to(dtype)] if mixes else []), *args, **options)
        return torch.autograd.grad(out.sum(), leaves)

    for found, expected in zip(gradients(torch.float32, variant="cpp"), gradients(torch.float64, variant="naive")):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@needs_library
@REALS
@pytest.mark.parametrize("size", [1e-20, 1e20])
@pytest.mark.parametrize("coordinates", [1, 70])
def test_deviations_whose_squares_are_no_numbers(size, coordinates, real):
    generator = torch.Generator().manual_seed(7)
    size = size if real == torch.float32 else size**8
    scale = size * (1 + torch.rand(9, coordinates, generator=generator, dtype=real))
    x, loc = (size * torch.randn(*shape, 70, generator=generator, dtype=real) for shape in ((11, 1), (9,)))
    loc[4] = x[3, 0]
    leaves = [one.requires_grad_() for one in (loc, scale, x)]
    wide = [one.detach().double().requires_grad_() for one in leaves]
    variants = zip((leaves, wide), ("cpp", "naive"))
    (found, right), unit = (effops.normal_log_prob(*args, variant=name).sum() for args, name in variants), 1 / size
    for one, other in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(right, wide)):
        torch.testing.assert_close(one.double() / unit, other / unit, rtol=1e-4, atol=1e-4)


@needs_library
@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize(("size", "dout"), [(1e-9, 1e25), (1e-9, 1e-27), (1e9, 1e-27), (1e9, 1e22), (1e9, 1e30)])
@pytest.mark.parametrize("coordinates", [1, 2])
def test_deviations_and_gradients_whose_products_are_no_numbers(coordinates, size, dout, mixes):
    def gradients(real, variant):
        loc, scale = torch.full((8, 2), 2 * size, dtype=real), torch.full((8, coordinates), size, dtype=real)
        leaves = [one.requires_grad_() for one in (loc, scale, torch.zeros(3, 1, 2, dtype=real))]
        function = effops.normal_mixture_log_prob if mixes else effops.normal_log_prob
        out = function(*([torch.zeros(8, dtype=real)] if mixes else []), *leaves, variant=variant)
        return torch.autograd.grad(out, leaves, torch.full_like(out, dout))

    for found, right in zip(gradients(torch.float32, "cpp"), gradients(torch.float64, "naive")):
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=0)


@needs_library
@pytest.mark.parametrize("components", [5, 16, 17])
def test_an_infinite_point_has_no_density(components):
    x = torch.zeros(3, 1, 4)
    x[1] = math.inf
    args = torch.zeros(components), torch.zeros(components, 4), torch.ones(components, 1), x
    found = effops.normal_mixture_log_prob(*args, variant="cpp")
    assert found[1] == -math.inf
    assert torch.isfinite(found[[0, 2]]).all()


@needs_library
def test_an_empty_batch_of_examples():
    loc, scale, x = torch.zeros(9, 4), torch.ones(9, 1), torch.zeros(0, 8, 1, 4)
    found = torch.func.vmap(lambda x: effops.normal_log_prob(loc, scale, x, variant="cpp"))(x)
    assert found.shape == (0, 8, 9)
