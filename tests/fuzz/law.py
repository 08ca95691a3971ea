"""The law of every call: right, or a clear error, and no input changed. Float64 judges what is right.

Besides, the same bits come again, gradients are laid out as their operands, and `explain` tells what comes: for every
variant that predicts its bytes, they are the measured ones, or the prediction names what it does not know.
"""

import contextlib
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

import effops
from effops.measure import Pass, memory
from effops.reference import reference_of
from effops.reference.reference import Bounds, worst_error_ratio

from ..support.blocks import small_blocks
from ..support.layouts import has_own_memory
from .build import EXAMPLES, MODES, Built, build
from .draw import SHAPES_ONLY, RandomCall, parameters
from .plain import PLAIN

NUMBERS_BYTES = 64  # of numbers that PyTorch wraps in tensors, which fake tensors do not show
MOST_BYTES = 2**29  # of a call that is measured
TAKES_SECONDS = ("compile", "flex", "triton")  # to compile, or to interpret; tests/matrix measures those that compile
PROBES = 3  # entries of a Jacobian or of a tangent that are judged


@dataclass
class Found:
    """What a transform gave: results, gradients of them, gradients of each of their entries, or a derivative along
    some direction."""

    out: Tensor | None = None
    gradients: tuple[Tensor, ...] | None = None
    jacobian: tuple[Tensor, ...] | None = None
    tangent: Tensor | None = None
    direction: tuple[Tensor, ...] | None = None

    def example(self, number: int, built: Built) -> "Found":
        """The part of one example."""
        dims = (built.in_dims[place] for place in built.places)
        along = [one if dim is None else one.select(dim, number) for one, dim in zip(self.direction or (), dims)]
        out, tangent = (None if one is None else one[number] for one in (self.out, self.tangent))
        gradients = None if self.gradients is None else tuple(one[number] for one in self.gradients)
        return Found(out, gradients, tangent=tangent, direction=tuple(along))

    @property
    def tensors(self) -> list[Tensor]:
        every = tree_leaves((self.out, self.gradients, self.jacobian, self.tangent))
        return [one for one in every if one is not None]


def with_gradients(function, built):
    out, wanted = function(*built.args), built.wanted
    return Found(out, torch.autograd.grad(out, wanted, built.upstream(out)) if wanted else None)


def weighted(function, built):
    def total(*args):
        out = function(*args)
        return (out * built.upstream(out)).sum(), out

    return torch.func.grad(total, built.places, has_aux=True)


def by_grad(function, built):
    gradients, out = weighted(function, built)(*built.args)
    return Found(out, gradients)


def by_vjp(function, built):
    out, pull_back = torch.func.vjp(built.of_wanted(function), *built.wanted)
    return Found(out, pull_back(built.upstream(out)))


def by_jvp(function, built):
    direction = tuple(torch.randn_like(one) for one in built.wanted)
    out, tangent = torch.func.jvp(built.of_wanted(function), built.wanted, direction)
    return Found(out, tangent=tangent, direction=direction)


def by_jacrev(function, built):
    places = tuple(range(len(built.places)))
    return Found(jacobian=torch.func.jacrev(built.of_wanted(function), places)(*built.wanted))


def by_vmap(function, built):
    return Found(torch.func.vmap(function, built.in_dims)(*built.args))


def by_jacfwd(function, built):
    places = tuple(range(len(built.places)))
    return Found(jacobian=torch.func.jacfwd(built.of_wanted(function), places)(*built.wanted))


def by_vmap_of_jvp(function, built):
    direction = tuple(torch.randn_like(one) for one in built.wanted)

    def along(args, direction):
        example = replace(built, args=list(args))
        return torch.func.jvp(example.of_wanted(function), example.wanted, direction)

    in_dims = built.in_dims, tuple(built.in_dims[place] for place in built.places)
    out, tangent = torch.func.vmap(along, in_dims)(tuple(built.args), direction)
    return Found(out, tangent=tangent, direction=direction)


def by_vmap_of_grad(function, built):
    gradients, out = torch.func.vmap(weighted(function, built), built.in_dims)(*built.args)
    return Found(out, gradients)


def without_gradients(context):
    def run(function, built):
        with context():
            return Found(function(*built.args))

    return run


RUNS = {
    "gradients": with_gradients,
    "no_grad": without_gradients(torch.no_grad),
    "inference_mode": without_gradients(torch.inference_mode),
    "grad": by_grad,
    "vjp": by_vjp,
    "jvp": by_jvp,
    "jacrev": by_jacrev,
    "jacfwd": by_jacfwd,
    "vmap": by_vmap,
    "vmap of jvp": by_vmap_of_jvp,
    "vmap of grad": by_vmap_of_grad,
    "functionalize": lambda function, built: with_gradients(torch.func.functionalize(function), built),
}


@dataclass
class Tally:
    """How many calls were made, how many of them the plain expression accepts, and which of these were refused.

    Besides, how many predictions of bytes were compared, and which of these name what they do not know.
    """

    calls: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    predicted: int = 0
    marked: Counter[str] = field(default_factory=Counter)

    @property
    def share_marked(self) -> float:
        return self.marked.total() / max(1, self.predicted)

    @property
    def share_refused(self) -> float:
        return self.refused.total() / max(1, self.accepted)

    def __str__(self) -> str:
        reasons = [f"{count} {reason}" for reason, count in self.refused.most_common()]
        refused = f"{self.refused.total()} of {self.accepted} refused ({self.share_refused:.2%})"
        unknown = [f"{count} {name}" for name, count in self.marked.most_common()]
        marked = f"{self.marked.total()} of {self.predicted} predictions of bytes marked ({self.share_marked:.2%})"
        return "\n".join([f"{self.calls} calls, {refused}", *reasons, marked, *unknown])


@contextlib.contextmanager
def medium_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def memory_full_of_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # which fills fresh memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS = {"medium precision": medium_precision, "memory full of NaN": memory_full_of_nan}


def hold(call: RandomCall, tally: Tally) -> None:
    """Raise AssertionError unless the law holds of a call."""
    with contextlib.ExitStack() as stack:
        if call.in_small_blocks:
            stack.enter_context(small_blocks())
        stack.enter_context(SURROUNDINGS.get(call.surroundings, contextlib.nullcontext)())
        built = build(call)
        run = RUNS[call.transform]
        before = [contents(arg) for arg in built.args]
        found, error = None, None
        try:
            with built.mode:
                found = run(called(call, built), built)
        except Exception as raised:
            error = raised
        assert before == [contents(arg) for arg in built.args], "an input was changed"
        plain = plainly(run, call, built)
        tally.calls += 1
        tally.accepted += plain is not None
        if error is not None:
            assert_clear(built, error)
            if plain is not None:
                tally.refused[reason(call, error)] += 1
        elif call.device == "cpu":
            judge(call, built, found)
            assert found.out is None or has_own_memory(found.out, built.args), "a result shares memory"
            assert_repeated(found, run, call, built)
            assert_laid_out(call, built, found)
        else:
            assert_like_on_cpu(call, found)
        if call.transform in SHAPES_ONLY:
            assert_explained(call, built, found, error)
        # Of empty tensors, PyTorch's attention has results of another shape; under autocast it has its own dtypes.
        if found is not None and plain is not None and not built.has_empty and call.surroundings not in MODES:
            assert_alike(call, found, plain)


def hold_bytes(call: RandomCall, tally: Tally) -> None:
    """Raise AssertionError unless the bytes of all variants are the measured ones, within those of wrapped numbers.

    They are those of the first call, but of scripted forms, which PyTorch compiles then.

    All transforms but `no_grad` are left out: predictions are those of plain calls.
    """
    if call.device != "cpu" or call.mistake:
        return
    call = replace(call, transform=call.transform if call.transform == "no_grad" else "gradients")
    with contextlib.ExitStack() as stack:
        if call.in_small_blocks:
            stack.enter_context(small_blocks())
        stack.enter_context(SURROUNDINGS.get(call.surroundings, contextlib.nullcontext)())
        built = build(call)
        stack.enter_context(built.mode)
        stack.enter_context(torch.no_grad() if call.transform == "no_grad" else torch.enable_grad())
        options = {**built.options, "variant": None}
        try:
            reports = effops.explain(built.op.function, *built.args, **options).variants
        except (NotImplementedError, TypeError, ValueError):  # the call raises it too, which `hold` asserts
            return
        for name, report in reports.items():
            predicted = report.output_bytes, report.saved_bytes, report.temporary_bytes
            if report.reason or None in predicted or name in TAKES_SECONDS or sum(predicted) > MOST_BYTES:
                continue
            tally.predicted += 1
            if report.unknown:
                tally.marked[f"{name}: {report.unknown}"] += 1
                continue
            run = functools.partial(built.op, **{**options, "variant": name})
            found = memory(Pass(run, tuple(built.args)), warmup=int(name == "torchscript"))
            measured = found.output_bytes, found.saved_bytes, found.temporary_bytes
            is_right = all(abs(one - other) <= NUMBERS_BYTES for one, other in zip(predicted, measured))
            assert is_right, f"{name}: {predicted} bytes (output, saved, temporary) predicted, {measured} measured"


def called(call: RandomCall, built: Built) -> Callable[..., Tensor]:
    """The public function with the options of the call."""
    if not call.by_name:
        return functools.partial(built.op, **built.options)
    names = [*parameters(built.op)[1], "attn_mask"]
    return lambda *args: built.op(**dict(zip(names, args)), **built.options)


def contents(arg: Any) -> Any:
    """All bytes behind a tensor, those between its elements included; None of other arguments."""
    if not isinstance(arg, Tensor) or isinstance(arg, FakeTensor) or arg.is_meta or arg.layout != torch.strided:
        return None
    memory = torch.empty(0, dtype=torch.uint8).set_(arg.untyped_storage())
    return arg.requires_grad, hash(memory.numpy().tobytes())


def plainly(run, call: RandomCall, built: Built) -> Found | None:
    """What the plain expression gives, or None if it accepts no such call."""
    if call.mistake == "an unknown variant":
        return None
    try:
        with built.mode:
            return run(functools.partial(PLAIN[built.op.name], **built.settings), built)
    except Exception:
        return None


def assert_clear(built: Built, error: Exception) -> None:
    """The error must be one that the library raises by itself: it names the op, and says what to do."""
    assert isinstance(error, (TypeError, ValueError, NotImplementedError, RuntimeError)), repr(error)
    expected = rf"{built.op.name}(\(variant=\"\w+\"\):?|:| has) .+; .+"
    assert re.match(expected, str(error), re.DOTALL), repr(error)


def reason(call: RandomCall, error: Exception) -> str:
    """What an error says, without what it says of one op or call alone."""
    text = re.sub(r"\(\d[\d, ]*\)|\d+|`\w+`", "..", str(error).partition("; ")[0].removeprefix(call.op))
    return f"{type(error).__name__}{text}"


def judge(call: RandomCall, built: Built, found: Found) -> None:
    """Compare with float64, in the budgets of the op's reference."""
    numbers = range(EXAMPLES) if call.transform.startswith("vmap") else [None]
    for number in numbers:
        with built.mode:  # autocast rounds operands
            prepared = built.op.prepare(*built.example(number), **built.settings)
        judge_example(call, built, prepared, found if number is None else found.example(number, built))


def judge_example(call: RandomCall, built: Built, prepared: Any, found: Found) -> None:
    reference, count = reference_of(built.op), math.prod(prepared.shape)
    if found.out is not None:
        ratio = reference.bounds(prepared).error_ratio(found.out.reshape(prepared.shape))
        assert ratio <= 1, f"the result is off by {ratio} budgets"
    if found.gradients is not None:
        assert [one.dtype for one in found.gradients] == [one.dtype for one in built.wanted]
        dout = built.upstream(found.out).reshape(prepared.shape)
        ratio = gradient_ratio(reference, prepared, dout, built.places, found.gradients)
        assert ratio <= 1, f"a gradient is off by {ratio} budgets"
    generator = torch.Generator().manual_seed(call.seed)
    for entry in torch.randint(max(1, count), (PROBES,), generator=generator).tolist() if count else ():
        dout = torch.zeros(count, dtype=prepared.dtype)
        dout[entry] = 1
        dout = dout.view(prepared.shape)
        if found.jacobian is not None:
            rows = [one.reshape(count, *arg.shape)[entry] for one, arg in zip(found.jacobian, built.wanted)]
            ratio = gradient_ratio(reference, prepared, dout, built.places, rows)
            assert ratio <= 1, f"entry {entry} of the Jacobian is off by {ratio} budgets"
        if found.tangent is not None:
            ratio = tangent_ratio(reference, prepared, dout, built.places, found, entry)
            assert ratio <= 1, f"entry {entry} of the tangent is off by {ratio} budgets"


def gradient_ratio(reference, prepared, dout, places, gradients) -> float:
    """The error of some gradients, those of the arguments at `places`, in units of their budgets."""
    bounds, found = [], []
    every = reference.gradient_bounds(prepared, dout)
    for place, gradient in zip(places, gradients, strict=True):
        bound, dtype = every[place], prepared.tensors[place].dtype
        if gradient.dtype != dtype:  # autocast rounds operands: their gradients are rounded twice
            finite = torch.finfo(gradient.dtype)
            rounding = bound.value.abs() * (finite.eps / 2) + finite.smallest_normal
            bound = replace(bound, below=bound.below + rounding, above=bound.above + rounding)
        bounds.append(bound)
        found.append(gradient.to(dtype).reshape(bound.value.shape))
    return worst_error_ratio(bounds, found)


def tangent_ratio(reference, prepared, dout, places, found: Found, entry: int) -> float:
    """The error of the derivative of one entry along a direction, by the budgets of the gradients."""
    bounds = reference.gradient_bounds(prepared, dout)
    value, radius = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for place, direction in zip(places, found.direction):
        rounded = direction.to(prepared.tensors[place].dtype)  # by autocast
        along = rounded.double().reshape(bounds[place].value.shape)
        value += (bounds[place].value * along).sum()
        radius += (torch.maximum(bounds[place].below, bounds[place].above) * along.abs()).sum()
    return Bounds(value, radius, radius).error_ratio(found.tangent.reshape(-1)[entry])


def assert_repeated(found: Found, run, call: RandomCall, built: Built) -> None:
    """The same call gives the same bits."""
    if found.direction is None:  # which is drawn anew
        with built.mode:
            again = run(called(call, built), built)
        same = (torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(found.tensors, again.tensors))
        assert all(same), "another result the second time"


def assert_laid_out(call: RandomCall, built: Built, found: Found) -> None:
    """The gradient of a leaf has its strides, so that PyTorch takes it without a copy."""
    if call.transform == "gradients" and call.variant in ("chunked", "triton") and call.surroundings not in MODES:
        for gradient, leaf in zip(found.gradients or (), built.wanted):
            expected = torch.empty_like(leaf)
            assert memory_order(gradient) == memory_order(expected), f"a gradient has strides {gradient.stride()}"


def assert_explained(call: RandomCall, built: Built, found: Found | None, error: Exception | None) -> None:
    """`explain` raises what the call raises, or tells the bytes of its result."""
    grad_mode, raised = torch.no_grad if call.transform == "no_grad" else torch.enable_grad, None
    try:
        with built.mode, grad_mode():
            explanation = effops.explain(built.op.function, *built.args, **built.options)
    except Exception as caught:
        raised = caught
    assert str(raised) == str(error), f"explain raises {raised!r}, and the call {error!r}"
    if found is not None:
        assert explanation.variants[explanation.chosen].output_bytes == found.out.nbytes


def assert_like_on_cpu(call: RandomCall, found: Found) -> None:
    """A result without values has the shape and the dtype of that with values, and a fake one its strides too."""
    was, call = call.device, replace(call, device="cpu")
    built = build(call)
    expected = RUNS[call.transform](called(call, built), built)
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        is_alike = memory_order(one) == memory_order(other) or was == "meta"  # which stands for any device
        assert is_alike, f"strides {one.stride()}, with values {other.stride()}"


def memory_order(tensor: Tensor) -> list[int]:
    """The strides that matter: a tensor without elements has none, nor has an axis of one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1 and tensor.numel()]


def assert_alike(call: RandomCall, found: Found, plain: Found) -> None:
    """Shapes and dtypes are those of the plain expression, but for tangents, which PyTorch makes of another dtype.

    The dtype of a Jacobian that it makes of tangents is float64 where an operand is a Python number.
    """
    is_of_tangents = call.transform == "jacfwd" and any(one.kind == "number" for one in call.operands)

    def described(each: Found) -> list[tuple[Any, ...]]:
        tensors = replace(each, tangent=None).tensors
        return [(tuple(one.shape), None if is_of_tangents else one.dtype) for one in tensors]

    shapes, expected = described(found), described(plain)
    assert shapes == expected, f"{shapes}, plainly {expected}"
