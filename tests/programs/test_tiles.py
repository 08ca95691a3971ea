"""`effops.tiled`: results and gradients of any function, within a budget."""

import gc
import re
import threading
import warnings
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch._inductor import metrics
from torch._inductor.exc import InductorError
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._device import DeviceContext
from torch.utils.flop_counter import FlopCounterMode

import effops
from effops.dispatch import requirements
from effops.measure import Pass, memory
from effops.prediction.operations import ELEMENTWISE, operations
from effops.programs.rules import scan
from effops.programs.rules.binding import all_but
from effops.programs.tiles import function as module
from effops.programs.tiles import loops

BUDGET = 2**20


def pairs(x, y):
    return ((x[:, None] - y) ** 2).sum(-1)


def by_product(x, y):
    return (x[:, None] * y).sum(-1).exp()


def log_sum(x, y):
    return torch.logsumexp(-pairs(x, y), 1)


def log_sum_of_all(x, y):
    return torch.logsumexp(-pairs(x, y).flatten(), 0)


def weighted(x, y):
    return torch.softmax(-pairs(x, y), -1) @ y


def weighted_along_rows(x, y):
    return torch.softmax(-pairs(x, y), 0).sum(1)


def nearest(x, y):
    return pairs(x, y).min(1).values.mean() + pairs(x, y).amin(0).mean()


def largest(x, y):
    return pairs(x, y).amax((0, 1))


def ties(x, y):
    return (x.round()[:, None] * y.round()).amax((1, 2)).sum() + (x.round()[:, None] * y.round()).amin((0, 1)).sum()


def assigned(x, y):
    return pairs(x, y).argmin(1)


def first_ones(x, y):
    z = pairs(x, y)
    return z.argmin(0), z.argmax(1), z.max(0).values.sum() + z.min(1).values.sum(), z.argmax()


def running(x, y):
    z = pairs(x, y)
    return (z.cumsum(0) * z.cumsum(1)).sum(1) / 1e4, z.cummin(0).values.mean(1) + z.cummax(1).values.mean(1)


def spread(x, y):
    z = pairs(x, y)
    return z.std(0).sum() + z.std(1).sum(), z.norm(), (1 + z / 1e3).prod(0) + (1 + z / 1e3).prod(1).mean()


def normalised(x, y):
    z = x[:, None] * y
    return ((z - z.mean(-1, keepdim=True)) / (z.var(-1, keepdim=True) + 1e-3).sqrt()).mean((0, 1))


def masked(x, y):
    scores = pairs(x, y).masked_fill(torch.ones(len(x), len(y)).tril().bool(), -torch.inf)
    return torch.logsumexp(scores, 1).clamp(min=-10)


def by_position(x, y):
    distance = torch.arange(len(x))[:, None] - torch.arange(len(y))
    return (pairs(x, y) * distance).mean(1) + torch.triu(pairs(x, y), 3).sum(1)


def gathered(x, y):
    place = (torch.arange(len(y)) * 7) % len(x)
    return ((x[place] * y)[:, None] * y).tanh().sum((1, 2))


def in_place(x, y):
    z = pairs(x, y)
    z += 1
    z.mul_(0.5).clamp_(max=3)
    return z.log().sum(1)


def with_detached(x, y):
    z = pairs(x, y)
    return (z - z.detach().amax(1, keepdim=True)).exp().sum(1) + z.amin(1).detach()


def without_gradients(x, y):
    z = pairs(x, y)
    with torch.no_grad():
        scale = z.sqrt().sum(1, keepdim=True)
    return (z / scale).sum(1)


def by_vmap(x, y):
    return torch.vmap(lambda a: torch.vmap(lambda b: (a - b).abs().sum())(y))(x).exp().sum(1)


def large_result(x, y):
    return pairs(x, y).sqrt().add(1)


def two_results(x, y):
    z = pairs(x, y)
    return z.sum(0), {"rows": (z.sum(1), x), "count": len(x)}


def of_booleans(x, y):
    near = pairs(x, y) < 2
    return near.any(1), near.all(0), near.sum(1)


def with_complex(x, y):
    phases = torch.polar(torch.ones(()), pairs(x, y))
    return phases.sum(1).abs()


def triples(x):
    return torch.einsum("bi,bj,bk->ijk", x, x, x).tanh().sum(0)


FUNCTIONS = (
    by_product,
    log_sum,
    log_sum_of_all,
    weighted,
    weighted_along_rows,
    nearest,
    largest,
    ties,
    assigned,
    first_ones,
    running,
    spread,
    normalised,
    masked,
    by_position,
    gathered,
    in_place,
    with_detached,
    without_gradients,
    by_vmap,
    large_result,
    two_results,
    of_booleans,
    with_complex,
)


def points(n, m, d, generator, dtype=torch.float32):
    return [torch.randn(size, d, generator=generator).to(dtype).requires_grad_() for size in (n, m)]


def tensors(value):
    return [one for one in torch.utils._pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def gradients_of(out, leaves, generator):
    outputs = [one for one in tensors(out) if one.requires_grad and one.grad_fn is not None]
    upstream = [torch.randn(one.shape, generator=generator) for one in outputs]
    return torch.autograd.grad(outputs, leaves, upstream, allow_unused=True) if outputs else []


def close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        if other is None:
            assert one is None
        else:
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            size = other.abs().max().item() if other.numel() and other.dtype != torch.bool else 1
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * max(1, size))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(function, id=function.__name__, marks=() if number % 4 == 0 else pytest.mark.slow)
        for number, function in enumerate(FUNCTIONS)
    ],
)
def test_results_and_gradients(function, generator):
    leaves = points(280, 210, 6, generator)
    tiled = effops.tiled(function, budget=BUDGET)
    report = effops.explain(tiled, *leaves)
    assert report.taken_bytes <= BUDGET < report.as_it_is_bytes, report
    assert report.loops or function is by_product  # whose products are of matrices
    out, expected = tiled(*leaves), function(*leaves)
    close(tensors(out), tensors(expected))
    state = generator.get_state()
    found = gradients_of(out, leaves, generator)
    generator.set_state(state)
    close(found, gradients_of(expected, leaves, generator))

    def both(*leaves):
        out = tiled(*leaves)
        outputs = [one for one in tensors(out) if one.requires_grad and one.grad_fn is not None]
        return out, torch.autograd.grad(
            [one.real.sum() for one in outputs], leaves, allow_unused=True
        ) if outputs else ()

    assert memory(Pass(both, leaves)).temporary_bytes <= BUDGET
    plain = [leaf.detach() for leaf in leaves]
    close(tensors(tiled(*plain)), tensors(function(*plain)))
    assert memory(Pass(tiled, plain)).temporary_bytes <= BUDGET


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, generator):
    """Sums over tiles are rounded once."""
    x, y = points(300, 200, 6, generator, dtype)
    for function in (by_product, log_sum, lambda x, y: (x[:, None] * y).tanh().sum((0, 1))):
        found, expected = effops.tiled(function, budget=2**19)(x, y), function(x, y)
        assert found.dtype == dtype
        exact = function(x.double(), y.double())
        error, own = ((one.double() - exact).abs().max().item() for one in (found, expected))
        assert error <= 2 * own + 4 * torch.finfo(dtype).eps * exact.abs().max().item()


def test_a_module_and_its_parameters(generator):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x, *, scale=1.0):
            both = torch.cat([x[:, None].expand(-1, len(x), -1), x.expand(len(x), -1, -1)], -1)
            return self.second(torch.relu(self.first(both))).squeeze(-1).mean(1) * scale + self.shift.sum()

    net = Net()
    x = torch.randn(120, 4, generator=generator, requires_grad=True)
    tiled = effops.tiled(net, budget=BUDGET)
    leaves = [x, *net.parameters()]
    out, expected = tiled(x, scale=2.0), net(x, scale=2.0)
    close([out], [expected])
    upstream = torch.randn(out.shape, generator=generator)
    close(torch.autograd.grad(out, leaves, upstream), torch.autograd.grad(expected, leaves, upstream))
    with torch.no_grad():
        net.second.bias.add_(1)
        net.shift.mul_(2)
    close([tiled(x)], [net(x)])
    net.first = nn.Linear(8, 16)
    close([tiled(x)], [net(x)])


FACTOR = 2.0


def test_what_a_call_depends_on_is_seen(generator, monkeypatch):
    x, y = points(200, 150, 4, generator)
    scale, options = torch.tensor(3.0, requires_grad=True), {"shift": 1.0}

    def function(x, y, power=2):
        return (pairs(x, y) * scale * FACTOR + options["shift"]).pow(power).mean(1)

    tiled = effops.tiled(function, budget=2**18)
    close([tiled(x, y)], [function(x, y)])
    close(torch.autograd.grad(tiled(x, y).sum(), scale), torch.autograd.grad(function(x, y).sum(), scale))
    options["shift"] = 2.0
    close([tiled(x, y)], [function(x, y)])
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    close([tiled(x, y)], [function(x, y)])
    close([tiled(x, y, power=3)], [function(x, y, power=3)])
    with torch.no_grad():
        scale.fill_(0.5)
        close([tiled(x, y)], [function(x, y)])
        assert not tiled(x, y).requires_grad
    scale = torch.tensor(7.0)
    close([tiled(x, y)], [function(x, y)])
    with torch.autocast("cpu", torch.bfloat16):
        assert effops.tiled(lambda x, y: (x @ y.mT).exp()[..., None].mul(y).sum(1), budget=2**18)(x, y).isfinite().all()


def test_other_sizes_need_no_other_capture(generator):
    tiled = effops.tiled(log_sum, budget=2**18)
    for size in range(120, 140):
        x, y = points(size, size - 7, 5, generator)
        close([tiled(x, y)], [log_sum(x, y)])
    assert len(tiled.captured.graphs) == 1


def test_a_number_that_takes_many_captures_is_named(generator):
    x = torch.randn(40, 3, generator=generator)
    tiled = effops.tiled(lambda x, scale, names: pairs(x, x) * scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(7):
            tiled(x, number, [*"several"])
    with pytest.warns(UserWarning, match="`scale` of .*lambda.* had 8 values.*give it as a tensor"):
        tiled(x, 7, [*"several"])
    tiled(x, 3, [*"several"])


@pytest.mark.compiled
def test_compiled_tiles(generator):
    x, y = (torch.randn(size, 8, generator=generator, requires_grad=True) for size in (300, 200))
    tiled = effops.tiled(log_sum, budget=BUDGET // 4, compile=True)
    metrics.reset()
    result = tiled(x, y)
    gradients = torch.autograd.grad(result.square().sum(), (x, y))
    count = metrics.generated_cpp_vec_kernel_count
    assert count
    expected = log_sum(x, y)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), (x, y)), rtol=1e-3, atol=1e-4)
    tiled(x, y).sum().backward()
    assert metrics.generated_cpp_vec_kernel_count == count  # nothing was compiled again
    assert memory(Pass(tiled, (x, y), backward=True)).temporary_bytes <= BUDGET // 4


def test_division_without_remainder_is_elementwise():
    """PyTorch does not tag it so, and it was refused."""
    x, y = torch.randn(300, 8), torch.rand(200, 8) + 0.1

    def quotients(x, y):
        return (x[:, None] // y).sum(-1)

    tiled = effops.tiled(quotients, budget=BUDGET // 4)
    assert torch.equal(tiled(x, y), quotients(x, y))
    assert memory(Pass(tiled, (x, y))).temporary_bytes <= BUDGET // 4
    assert operations(torch.ops.aten.floor_divide.default, (x, x), {}, x) == (ELEMENTWISE, x.numel())


def test_tiles_are_not_compiled_without_a_compiler(monkeypatch):
    """It said that the function cannot be captured, and to put less into it."""
    lack = requirements.Lack("a C++ compiler, and g++ was not found", "install one or name it in CXX")
    monkeypatch.setattr(module, "lack_of_compiler", lambda: lack)
    x, y = torch.ones(300, 8), torch.ones(200, 8)
    tiled = effops.tiled(log_sum, budget=BUDGET // 4, compile=True)
    expected = (
        "tiled: compile=True needs a C++ compiler, and g++ was not found; install one or name it in CXX, or leave "
    )
    with pytest.raises(effops.CannotTile, match=f"^{re.escape(expected)}out compile=True$"):
        tiled(x, y)
    assert tiled(x[:2], y[:2]).shape == (2,)  # within the budget as it is


def test_tiles_that_inductor_cannot_compile_tell_its_error(monkeypatch):
    """An old compiler, too, was told as a function that cannot be captured."""

    def failing(graph, parts):
        error = RuntimeError("C++ compile error\n\nCommand:\ng++ -std=c++20\n\nOutput:\ng++: error: unknown option")
        raise InductorError(error, None)

    monkeypatch.setattr(loops, "lookup_backend", lambda name: failing)
    tiled = effops.tiled(log_sum, budget=BUDGET // 4, compile=True)
    expected = "tiled: Inductor cannot compile a tile: g++: error: unknown option; mend that, or leave out compile=True"
    with pytest.raises(effops.CannotTile, match=f"^{re.escape(expected)}$"):
        tiled(torch.ones(300, 8), torch.ones(200, 8))


@pytest.mark.compiled
def test_compiled_tiles_of_one_length_forward_and_backward(generator):
    """Each tile reads a tensor whole, which requires gradients in the forward pass too."""
    x, y = (torch.randn(size, 16, generator=generator, requires_grad=True) for size in (512, 1024))

    def kernel_sum(x, y):
        return torch.exp(-(x[:, None] - y).square().sum(-1)) @ y

    tiled = effops.tiled(kernel_sum, budget=2**19, compile=True)
    (loop,) = effops.explain(tiled, x, y).loops
    assert loop.tile == loop.backward_tile == 1
    found, right = (torch.autograd.grad(one(x, y).square().sum(), (x, y)) for one in (tiled, kernel_sum))
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)


def test_a_weight_whose_gradient_is_above_the_budget(generator):
    """Its gradient is summed up within the products; a gradient for each tile would take more than the budget."""
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((300, 16), (20000, 16), (20000,))
    )
    targets = torch.randint(20000, (300,), generator=generator)

    def head(hidden, weight, bias):
        return functional.cross_entropy(functional.linear(hidden, weight, bias), targets)

    tiled = effops.tiled(head, budget=BUDGET)
    assert memory(Pass(tiled, (hidden, weight, bias), backward=True)).temporary_bytes <= BUDGET < weight.nbytes
    found, right = (torch.autograd.grad(one(hidden, weight, bias), (hidden, weight, bias)) for one in (tiled, head))
    for one, other in zip(found, right):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * other.abs().max().item())


def test_a_weight_with_a_factor(generator):
    """The sum of its gradient knows none, so that autograd makes it."""
    rows, weight, bias = (
        torch.randn(*one, generator=generator, requires_grad=True) for one in ((5000, 8), (8, 90), (90,))
    )

    def layer(rows, weight, bias):
        return torch.addmm(bias, rows, weight, alpha=2.0, beta=0.5).sin().sum(1)

    tiled = effops.tiled(layer, budget=BUDGET // 4)
    found, right = (torch.autograd.grad(one(rows, weight, bias).sum(), (rows, weight, bias)) for one in (tiled, layer))
    for one, other in zip(found, right):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())


def test_an_einsum_of_three_operands_takes_a_path(generator):
    x = torch.randn(64, 100, generator=generator, requires_grad=True)
    close([effops.tiled(triples, budget=2 * BUDGET)(x)], [triples(x)])
    assert torch.backends.opt_einsum.enabled


def test_products_may_suffice(generator):
    x, y = points(200, 300, 40, generator)
    report = effops.explain(effops.tiled(lambda x, y: (x[:, None] * y).sum(-1), budget=BUDGET), x, y)
    assert not report.loops
    assert report.taken_bytes <= BUDGET < report.as_it_is_bytes
    assert str(report).startswith("products of matrices, and no tiles: ")


def test_small_calls_run_as_they_are(generator):
    x, y = points(9, 7, 5, generator)
    tiled = effops.tiled(log_sum)
    assert not effops.explain(tiled, x, y).loops
    assert "runs as it is" in str(effops.explain(tiled, x, y))
    assert torch.equal(tiled(x, y), log_sum(x, y))


def test_explanation(generator):
    x, y = points(280, 210, 6, generator)
    report = effops.explain(effops.tiled(log_sum, budget=BUDGET), x, y)
    (loop,) = report.loops
    assert loop.length in (280, 210)
    assert loop.tile < loop.length
    assert loop.line.startswith(f"{__file__}:")
    assert report.taken_bytes <= BUDGET < report.as_it_is_bytes
    assert "1 loop over tiles" in str(report)


def test_usage_as_a_decorator(generator):
    @effops.tiled(budget="1 MiB")
    def named(x, y):
        """What it does."""
        return log_sum(x, y)

    assert (named.__name__, named.__doc__) == ("named", "What it does.")
    assert effops.tiled(log_sum)(*points(9, 7, 3, generator)).shape == (9,)
    with pytest.raises(ValueError, match=r"^tiled: `budget`: expected"):
        effops.tiled(log_sum, budget="much")


def refused(function, *args, budget=BUDGET, **kwargs):
    tiled = effops.tiled(function, budget=budget)
    answer = effops.explain(tiled, *args, **kwargs)
    assert isinstance(answer, effops.CannotTile), answer
    with pytest.raises(effops.CannotTile) as caught:
        tiled(*args, **kwargs)
    assert str(caught.value) == str(answer)
    return answer


def test_refusals(generator):
    x, y = points(280, 210, 6, generator)
    answer = refused(lambda x, y: functional.dropout(x[:, None] * y, 0.5).sum(1), x, y)
    assert "must not draw random numbers" in answer.reason
    assert answer.line.startswith(f"{__file__}:")
    assert "aten" in answer.operator
    answer = refused(lambda x, y: torch.as_strided(x[:, None] * y, (90, 90), (90, 1)).sum(), x, y)
    assert "no rule" in answer.reason
    assert answer.shapes
    answer = refused(lambda x, y: x.add_(1) + y.sum(), x.detach(), y)
    assert "must not be changed" in answer.reason
    answer = refused(lambda x, y: pairs(x, y)[pairs(x, y) > 1].sum(), x, y)
    assert "depend" in answer.reason
    answer = refused(lambda x, y: x.sum() if x.sum() > 0 else y.sum(), x, y)
    assert "captured" in answer.reason
    assert answer.line.startswith(f"{__file__}:")
    answer = refused(lambda x, y: torch.sort((x[:, None] * y).flatten()).values.cos().sum(), x, y)
    assert "whole axis" in answer.reason
    answer = refused(log_sum, x, y, budget=2000)
    assert "budget" in answer.reason


def test_a_gradient_with_a_shape_that_depends_on_values(generator):
    """Before torch 2.13 fake tensors have a shape for it, though not always the right one, and nothing is refused."""

    def filled(x, y):
        return x.sin().index_fill(0, torch.tensor([1, 2, 1]), y[0, 0])

    x, y = points(280, 210, 6, generator)
    try:
        with FakeTensorMode():
            torch.ops.aten._unique(torch.zeros(3, dtype=torch.int64))
    except DynamicOutputShapeException:
        with pytest.raises(effops.CannotTile, match=r"in a gradient, that of aten._unique.* does; .*torch.no_grad\(\)"):
            effops.tiled(filled)(x, y)
    else:
        found = effops.compare(filled, effops.tiled(filled), x, y)
        assert found.other.error <= 1
        assert found.other.gradient_error <= 1


def test_mistakes(generator):
    x, y = points(280, 210, 6, generator)
    tiled = effops.tiled(log_sum, budget=BUDGET)
    for call, error, message in (
        (lambda: effops.tiled("16 MiB"), TypeError, r"`fn` must be a function.*write @effops.tiled\(budget='16 MiB'\)"),
        (lambda: effops.tiled(x), TypeError, "without calling it"),
        (lambda: effops.tiled(log_sum, "16 MiB"), TypeError, "give budget"),
        (lambda: effops.tiled(log_sum, x, y), TypeError, r"is called, as effops.tiled\(fn\)\(\*args\)"),
        (lambda: effops.tiled(log_sum, budget=0.5), ValueError, "expected at least 1 byte; got 0.5"),
        (lambda: effops.tiled(lambda x: float(x.sum()), budget="99 B")(x), effops.CannotTile, "must not read a number"),
        (lambda: tiled(x.detach().numpy(), y), TypeError, "`x` must be a tensor or a number; got one of numpy"),
        (
            lambda: tiled(x, y[:, :2]),
            effops.CannotTile,
            r"RuntimeError.*in .*test_tiles.py:\d+; the f",
        ),
        (
            lambda: effops.tiled(lambda x: x[x > 0].sum(), budget="99 B")(x),
            effops.CannotTile,
            "test_tiles.*torch.where",
        ),
        (
            lambda: effops.tiled(log_sum, compile="yes"),
            TypeError,
            "`compile` must be True or False; got str 'yes'; give True",
        ),
        (lambda: effops.tiled(log_sum, budget="99 B")(x, y), effops.CannotTile, "got 99 B; give at least .* KiB"),
        (
            lambda: effops.tiled(lambda x, y: (x[:, None] * y).as_strided((9,), (1,)), budget="99 B")(x, y),
            effops.CannotTile,
            "add a rule",
        ),
        (lambda: effops.compare(log_sum, x, y), TypeError, "`other` must be a function"),
        (lambda: effops.explain(log_sum, x, y), ValueError, r"effops.explain\(effops.tiled\(function\)"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_where_a_call_is_refused(generator):
    x, y = (leaf.detach() for leaf in points(280, 210, 6, generator))
    tiled = effops.tiled(log_sum, budget=BUDGET)
    with pytest.raises(effops.CannotTile, match=r"transform of torch\.func"):
        torch.func.grad(lambda x: tiled(x, y).sum())(x)
    with pytest.raises(effops.CannotTile, match="TorchFunctionMode"), torch.overrides.TorchFunctionMode():
        tiled(x, y)
    with pytest.raises(Exception, match=r"inside torch\.compile|tiled"):
        torch.compile(lambda x: tiled(x, y), fullgraph=True, backend="eager")(x)
    with torch.compiler.set_stance("force_eager"), pytest.raises(effops.CannotTile, match="stance 'force_eager'"):
        tiled(x, y)
    with pytest.raises(effops.CannotTile, match=r"dense|sparse"):
        effops.tiled(lambda x: x * 2, budget=BUDGET)(torch.eye(5).to_sparse())
    leaf = x.requires_grad_()
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(tiled(leaf, y).sum(), leaf, create_graph=True)
    out = tiled(leaf, y)
    with pytest.raises(NotImplementedError, match=r"got a batch, as.*call it once for each"):
        torch.autograd.grad(out, leaf, torch.ones(3, *out.shape), retain_graph=True, is_grads_batched=True)
    with pytest.raises(NotImplementedError, match="got a batch"):
        torch.vmap(lambda dout: torch.autograd.grad(out, leaf, dout, retain_graph=True))(torch.ones(3, *out.shape))
    with forward_ad.dual_level(), pytest.raises(effops.CannotTile, match="forward-mode"):
        tiled(forward_ad.make_dual(x.detach(), torch.ones_like(x)), y)


def test_modes_of_the_user_see_the_tiles(generator):
    """A counter of operations around the first call, which captures the function, and around a later one."""
    x, y = points(280, 210, 6, generator)
    tiled = effops.tiled(lambda x, y: (x @ y.mT).exp().sum(1), budget=2**16)
    counts = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            tiled(x, y)
        counts.append(counter.get_total_flops())
    assert counts[1] == 2 * 280 * 210 * 6
    assert counts[0] >= counts[1]  # the first call compares tiles, too
    torch.testing.assert_close(tiled(x, y), (x @ y.mT).exp().sum(1))
    with FlopCounterMode(display=False), DeviceContext("cpu"), pytest.raises(effops.CannotTile, match="FunctionMode"):
        tiled(x, y)


def test_distributions_keep_their_validation(generator, monkeypatch):
    """Capture needs it off for a moment."""
    locs, x = torch.randn(90, generator=generator), torch.randn(4000, generator=generator)

    def density(loc, x):
        scales = torch.distributions.Normal(loc, torch.ones(())).log_prob(x[:, None])
        return torch.logsumexp(scales, 1)

    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # compiling turns it off for all
    before = torch.distributions.Distribution._validate_args
    tiled = effops.tiled(density, budget=BUDGET)
    close([tiled(locs, x)], [density(locs, x)])
    assert torch.distributions.Distribution._validate_args is before
    close([tiled(locs, x[:3900])], [density(locs, x[:3900])])
    assert torch.distributions.Distribution._validate_args is before
    with pytest.raises(ValueError, match="parameter"):
        torch.distributions.Normal(0.0, -1.0)


def test_two_threads_at_once(generator):
    x, y = points(280, 210, 6, generator)
    tiled = effops.tiled(log_sum, budget=BUDGET)
    expected, found = log_sum(x, y), {}

    def call(number):
        found[number] = tiled(x, y)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for out in found.values():
        close([out], [expected])


def test_autocast_around_and_inside(generator):
    """Its casts are in the graph: a part that leaves autocast stays in float32."""
    x, y = points(280, 210, 16, generator)

    def function(x, y):
        narrow = x @ y.mT
        with torch.autocast("cpu", enabled=False):
            wide = x @ y.mT
        return (narrow.float()[..., None] * y).sum(1), (wide[..., None] * y).tanh().sum(1)

    tiled = effops.tiled(function, budget=BUDGET)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = tiled(x, y), function(x, y)
    close(out, expected)
    upstream = [torch.randn(one.shape, generator=generator) for one in expected]
    found, right = (torch.autograd.grad(one, (x, y), upstream) for one in (out, expected))
    for one, other in zip(found, right):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * other.abs().max().item())


def test_constants_inside(generator):
    x, y = points(280, 210, 6, generator)
    function = lambda x, y: ((pairs(x, y)[..., None] - torch.tensor([1.0, 2.0, 5.0])) ** 2).sum((1, 2))  # noqa: E731
    close([effops.tiled(function, budget=BUDGET)(x, y)], [function(x, y)])


def test_hooks_and_anomaly_mode_of_the_user(generator):
    x, y = points(280, 210, 6, generator)
    expected = torch.autograd.grad(log_sum(x, y).sum(), (x, y))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: packed.append(one) or one.numpy(), torch.from_numpy):
        out = effops.tiled(log_sum, budget=BUDGET)(x, y)
    close(torch.autograd.grad(out.sum(), (x, y)), expected)
    with torch.autograd.set_detect_anomaly(True):
        out = effops.tiled(log_sum, budget=BUDGET)(x, y)
        close(torch.autograd.grad(out.sum(), (x, y)), expected)
    tiled = effops.tiled(log_sum, budget=BUDGET)
    out = torch.utils.checkpoint.checkpoint(tiled, x, y, use_reentrant=False)
    close(torch.autograd.grad(out.sum(), (x, y)), expected)


def test_nothing_is_kept_between_calls(generator):
    x, y = points(280, 210, 6, generator)
    tiled = effops.tiled(log_sum, budget=BUDGET)
    tiled(x, y).sum().backward()
    gc.collect()
    alive = sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
    for _ in range(3):
        tiled(x, y).sum().backward()
    gc.collect()
    assert sum(isinstance(one, torch.Tensor) for one in gc.get_objects()) == alive


def test_a_wrong_rule_is_caught(generator, monkeypatch):
    """A cumulative sum that claims to treat each index of its axis alone."""
    monkeypatch.setitem(scan.RULES, torch.ops.aten.cumsum.default, None)
    monkeypatch.setitem(
        effops.programs.rules.table.RULES, torch.ops.aten.cumsum.default, lambda node: all_but(node, ())
    )
    x, y = points(280, 210, 6, generator)

    def running(x, y):
        return torch.cumsum(x[:, None] * y, 0).amax((1, 2))

    with pytest.raises(effops.TilesDiffer, match="please report"):
        effops.tiled(running, budget=BUDGET)(x, y)
    out = effops.tiled(running, budget=BUDGET, verify=False)(x, y)
    assert not torch.allclose(out, running(x, y))


Both = namedtuple("Both", ["rows", "columns"])


def test_results_keep_their_structure(generator):
    x, y = points(280, 210, 6, generator)

    def function(given):
        z = pairs(*given["points"])
        return Both(z.sum(1), [z.sum(0), None, given["points"][0]])

    out = effops.tiled(function, budget=BUDGET)({"points": (x, y)})
    assert type(out) is Both
    assert out.columns[1] is None
    assert out.columns[2] is x
    close(tensors(out), tensors(function({"points": (x, y)})))


def test_comparison(generator):
    x, y = points(280, 210, 6, generator)
    found = effops.compare(log_sum, effops.tiled(log_sum, budget=BUDGET), x, y)
    assert found.other.error <= 4
    assert found.other.gradient_error <= 4
    assert found.other.taken_bytes <= BUDGET < found.function.taken_bytes
    assert "other" in str(found)
    wrong = effops.compare(log_sum, lambda x, y: log_sum(x, y) * 1.01, x, y)
    assert wrong.other.error > 100
    with pytest.raises(ValueError, match=r"^compare: `other` must give .* of the shapes that `fn` gives"):
        effops.compare(log_sum, lambda x, y: log_sum(x, y)[None], x, y)


def test_comparison_of_integers_and_of_complex_numbers(generator):
    """A result that was all wrong had an error of 1.00, and a complex one was compared with itself."""
    x, y = points(280, 210, 6, generator)
    nearest = lambda x, y: (x[:, None] - y).square().sum(-1).argmin(1)  # noqa: E731
    found = effops.compare(nearest, lambda x, y: nearest(x, y) + 1, x, y)
    assert (found.function.differing, found.other.differing, found.other.error) == (0, 280, None)
    assert "280" in str(found)
    twice = lambda x, y: (x[:, None] * y).sum(-1).exp()  # noqa: E731
    wrong = effops.compare(twice, lambda x, y: twice(x, y) * 1.01, x, x).other
    assert wrong.gradient_error > 100  # they were compared with those of one of the arguments
    with pytest.raises(ValueError, match=r"^compare: `fn` must give the same shapes in float64"):
        effops.compare(lambda x: x[: x.element_size()], lambda x: x[: x.element_size()], x)
    turned = lambda x: x * 1j  # noqa: E731
    assert effops.compare(lambda x: turned(x).exp(), lambda x: turned(x).exp() * 1.01, x.detach()).other.error > 100


def test_a_question_of_keops_that_has_no_answer_there(generator):
    """A dense result of a product of all pairs, https://github.com/getkeops/keops/issues/429."""
    a, b, c = (torch.randn(*shape, 8, generator=generator).requires_grad_() for shape in ((400, 1), (1, 300), (1, 300)))
    function = lambda a, b, c: (torch.cos(a * b) * torch.exp(c)).sum(-1)  # noqa: E731
    tiled = effops.tiled(function, budget=BUDGET)
    upstream = torch.randn(400, 300, generator=generator)
    out, expected = tiled(a, b, c), function(a, b, c)
    close([out], [expected])
    close(*(torch.autograd.grad(one, (a, b, c), upstream) for one in (out, expected)))
    assert effops.explain(tiled, a, b, c).taken_bytes <= BUDGET
