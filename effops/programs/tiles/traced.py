"""The graph of a call: the operators of ATen that a captured function runs, for the sizes of its arguments."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from effops.dispatch.native import without_hooks
from effops.numerics.precision import arithmetic_dtype
from effops.prediction.allocations import fake_mode
from effops.programs.capture.places import kind_of
from effops.programs.capture.selections import ReadSelectionError, Selections, where
from effops.programs.rules.binding import WITHOUT_GRADIENTS, value_of
from effops.programs.tiles.refusals import CannotTile
from effops.programs.tiles.substitutes import taken_apart, with_products
from effops.pytorch.missing import present
from effops.pytorch.operators import aten
from effops.pytorch.prediction import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    OpOverload,
    handle_of,
    schema_of,
)
from effops.pytorch.tiles import (
    HigherOrderOperator,
    TagActivationCheckpoint,
    _set_grad_enabled,
    get_decompositions,
    preserve_node_meta,
    tag_activation_checkpoint,
    tracing,
)


def tracings(captured: GraphModule, args: Sequence[Any]) -> Iterator[GraphModule]:
    """The graphs of a call, in which more and more is taken apart, so that more axes can be cut, and more computed."""
    found = traced(captured, args)
    yield found
    targets = {node.target for node in found.graph.nodes}
    if not targets.isdisjoint(OF_SOFTMAX):
        yield traced(captured, args, apart=OF_SOFTMAX)
    if not targets.isdisjoint(OF_PICKS):
        yield traced(captured, args, apart=OF_SOFTMAX | OF_PICKS)


def traced(captured: GraphModule, args: Sequence[Any], *, apart: Mapping[Any, Callable[..., Any]] = {}) -> GraphModule:
    """The graph of a call with arguments, which may be real. Nothing is computed.

    Means, variances and extrema of all elements are taken apart into what can be combined, and masks into what depends
    on one index of each axis. So are what has no rule and PyTorch takes apart, and what is asked for in `apart`. Nodes
    that a function computes without gradients are marked.
    """
    # Views may be written to: they are taken apart when nothing is.
    views = {one: taken for one, taken in apart.items() if _is_view(one)}
    decompositions = {**_of_pytorch(), **DECOMPOSITIONS, **{one: apart[one] for one in apart if one not in views}}
    mode = fake_mode(allow_non_fake_inputs=True)
    with torch.inference_mode(False), mode:  # which counts no writes to tensors
        fakes = [_fake(one) if isinstance(one, Tensor) else one for one in args]
        with preserve_node_meta(), tracing(None), torch.enable_grad(), without_hooks():
            marking = _Marking(captured)
            try:
                graph = make_fx(marking.run, decompositions, _allow_non_fake_inputs=True)(*fakes)
            except ReadSelectionError:
                raise refused_at(
                    marking.running,
                    "a shape must not depend on values: that of x[mask] does, where it is read",
                    "use torch.where(mask, x, 0) or x.masked_fill(~mask, 0) in its place",
                ) from None
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                if error.func is aten._local_scalar_dense.default:
                    raise refused_at(
                        marking.running,
                        "what is cut must not read a number of a tensor, as .item(), float(), int() and bool() do",
                        "return the tensor, and read the number outside of the function",
                    ) from None
                raise refused_at(
                    marking.running,
                    f"a shape must not depend on values: that of {error.func} does",
                    "compute it outside of the function, or by a mask: torch.where or masked_fill in place of x[mask]",
                ) from None
            if any(_is_mutable(node) for node in graph.graph.nodes):
                _refuse_mutation_of_inputs(graph)
                pure = torch.func.functionalize(Interpreter(graph).run, remove="mutations")
                graph = make_fx(pure, decompositions, _allow_non_fake_inputs=True)(*fakes)
            others = taken_apart(graph.graph)
            if others or any(node.target in views for node in graph.graph.nodes):
                run, table = Interpreter(graph).run, {**others, **views, **decompositions}
                graph = make_fx(run, table, _allow_non_fake_inputs=True)(*fakes)
        _cast_bools_at_once(graph.graph)
        graph.graph.eliminate_dead_code()
        with_products(graph)
    return graph


def refuse_what_autograd_would_lose(captured: GraphModule) -> None:
    """Raise if a part of a captured function has a gradient of its own, or is a graph of its own.

    The trace has the operators inside of it, and neither that gradient nor what it does without gradients.
    """
    for module in captured.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if node.target is present(_set_grad_enabled) and node.args == (True,) and not torch.is_grad_enabled():
                raise refused_at(
                    node,
                    "what is cut must not switch gradients on inside of no_grad",
                    "leave out torch.enable_grad, or call the function with gradients",
                )
            if isinstance(node.target, HigherOrderOperator) and node.target is not present(tag_activation_checkpoint):
                raise refused_at(
                    node,
                    f"what is cut must not have a part with a graph of its own: {node.target} is one",
                    "write it with PyTorch's operators, without torch.autograd.Function",
                )


def _fake(tensor: Tensor) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_(tensor.requires_grad)  # a product whose gradient is wanted has its batches folded


def _refuse_mutation_of_inputs(graph: GraphModule) -> None:
    """Raise if an operator changes the memory of an input, also by a view of it."""
    inputs = {handle_of(one.meta["val"].untyped_storage()): one for one in graph.graph.nodes if _is_input(one)}
    for node in graph.graph.nodes:
        if _is_mutable(node):
            for number, one in enumerate(schema_of(node.target).arguments):
                value = node.args[number] if number < len(node.args) else node.kwargs.get(one.name)
                is_written = one.is_write and isinstance(value, Node)
                if is_written and handle_of(value.meta["val"].untyped_storage()) in inputs:
                    raise refused_at(
                        node,
                        f"an input, parameter, buffer or global must not be changed: {node.target} does",
                        "change a copy, or do it outside of the function",
                    )


def _is_input(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr") and isinstance(node.meta.get("val"), Tensor)


def _is_mutable(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _is_view(operator: Any) -> bool:
    return any(one.alias_info is not None for one in schema_of(operator).returns)


def _cast_bools_at_once(graph: Graph) -> None:
    """Leave out the dtype between, where 0 and 1 are cast twice: `one_hot(..).to(..)` makes int64 first."""
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        (between,) = node.args
        is_cast = between.target is aten._to_copy.default and not between.kwargs.keys() - {"dtype"}
        if is_cast and value_of(between.args[0]).dtype == torch.bool:
            node.args = between.args


class _Marking(Selections):
    """Runs a graph, and marks what it computes without gradients. A checkpoint inside is left out."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is present(tag_activation_checkpoint):
            body, *operands = args
            _, own = TagActivationCheckpoint.divide_kwargs(kwargs)
            return _Marking(body).run(*operands, *own.values())
        return super().call_function(target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        n.meta["custom"] = {WITHOUT_GRADIENTS: not torch.is_grad_enabled()}
        self.running = n  # so that an error can be told with its lines
        return super().run_node(n)


_FRAME = re.compile(r'File "(.*)", line (\d+), in ')


def lines_of(node: Node) -> tuple[str, str]:
    """The innermost lines of the user and of a library that called the operator of a node, empty if not known."""
    found = {"user": "", "library": ""}
    for file, line in _FRAME.findall(node.meta.get("stack_trace") or ""):
        kind = kind_of(file)
        if kind in found:
            found[kind] = f"{file}:{line}"
    return found["user"], found["library"]


def refused_at(node: Node, reason: str, remedy: str, shapes: Sequence[tuple[int, ...]] = ()) -> CannotTile:
    """The refusal of a function for one of its operators, with the lines that called it."""
    user, library = lines_of(node)
    operator = str(node.target)
    return CannotTile(reason, operator=operator, shapes=shapes, line=user, library_line=library, remedy=remedy)


def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return _mean_dim(x, None, dtype=dtype)


def _mean_dim(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum, in float32 or wider, by the number of elements."""
    if not x.is_floating_point():
        return NotImplemented  # type: ignore[no-any-return]
    axes = range(x.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    count = math.prod(x.shape[axis] for axis in axes if x.dim())
    result = dtype or x.dtype
    return (torch.sum(x, dim, keepdim, dtype=arithmetic_dtype(result)) / count).to(result)


def _variance(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    if not x.is_floating_point():
        return NotImplemented  # type: ignore[no-any-return]
    axes = list(range(x.dim())) if not dim else [dim] if isinstance(dim, int) else list(dim)
    count = math.prod(x.shape[axis] for axis in axes)
    wide = x.to(arithmetic_dtype(x.dtype))
    deviations = wide - wide.sum(axes, keepdim=True) / count
    squares = (deviations * deviations).sum(axes, keepdim)
    return (squares / max(0, count - (1 if correction is None else correction))).to(x.dtype)


def _deviation(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """The root of the variance. Its gradient is 0 where it is 0."""
    if not x.is_floating_point():
        return NotImplemented  # type: ignore[no-any-return]
    variance = _variance(x.to(arithmetic_dtype(x.dtype)), dim, correction=correction, keepdim=keepdim)
    is_zero = variance == 0
    return torch.where(is_zero, 0, torch.where(is_zero, 1, variance).sqrt()).to(x.dtype)


def _with_mean(spread: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def both(
        x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not x.is_floating_point():
            return NotImplemented  # type: ignore[no-any-return]
        return spread(x, dim, correction=correction, keepdim=keepdim), _mean_dim(x, dim, keepdim)

    return both


def _number_of(extremum: Any) -> Callable[..., Tensor]:
    """The number of the first extremum, among all elements if no axis is given. `max` is faster than `argmax`."""

    def number(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is not None:
            return extremum(x, dim, keepdim)[1]  # type: ignore[no-any-return]
        found: Tensor = extremum(x.reshape(-1), 0, False)[1]
        return found.reshape([1] * x.dim()) if keepdim else found

    return number


def _extrema(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    axes = [*range(x.dim())] if dim is None else [dim]
    return torch.amin(x, axes, keepdim), torch.amax(x, axes, keepdim)


def _sum_without_nan(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if not x.is_floating_point():
        return NotImplemented  # type: ignore[no-any-return]
    return torch.sum(torch.where(x.isnan(), 0, x), dim, keepdim, dtype=dtype)


def _new(made: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A tensor that has the dtype and device of another one, and nothing else of it."""

    def like(x: Tensor, *args: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
        return made(*args, dtype=dtype or x.dtype, device=device or x.device)

    return like


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = x.to(arithmetic_dtype(x.dtype))
    found = torch.exp(wide - torch.logsumexp(wide, dim, keepdim=True))
    return found if half_to_float else found.to(x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = x.to(arithmetic_dtype(x.dtype))
    found = wide - torch.logsumexp(wide, dim, keepdim=True)
    return found if half_to_float else found.to(x.dtype)


def _squeezed(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Without those axes that have size 1, which a tile of length 1 has too along another one."""
    chosen = sorted({dim % x.dim() for dim in dims} if x.dim() else set(), reverse=True)
    found: Tensor = aten.alias.default(x)
    for axis in chosen:
        if x.shape[axis] == 1:
            found = aten.select.int(found, axis, 0)
    return found


def _repeated(x: Tensor, repeats: Sequence[int]) -> Tensor:
    """Each copy of the whole along an axis of its own, which can be cut; then the two are joined."""
    shape = [1] * (len(repeats) - x.dim()) + [*x.shape]
    apart = x.view([size for own in shape for size in (1, own)])
    copies = apart.expand([size for pair in zip(repeats, shape) for size in pair])
    return copies.clone(memory_format=torch.contiguous_format).view([a * b for a, b in zip(repeats, shape)])


def _eye(n: int, m: int | None = None, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    rows, columns = (torch.arange(size, device=device) for size in (n, n if m is None else m))
    return (rows[:, None] == columns).to(dtype or torch.get_default_dtype())


def _triangle(keeps: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """Zeros where the distance from the diagonal does not hold."""

    def masked(x: Tensor, diagonal: int = 0) -> Tensor:
        rows, columns = (torch.arange(size, device=x.device) for size in x.shape[-2:])
        return torch.where(keeps(columns - rows[:, None], diagonal), x, torch.zeros((), dtype=x.dtype, device=x.device))

    return masked


def _gathered_by_mask(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """One element of each row, as a sum of the row in which all others are 0: its axis can be cut."""
    axis = dim % x.dim() if x.dim() else 0
    shape = [1 if own == axis else size for own, size in enumerate(x.shape)]
    if not x.is_floating_point() or list(index.shape) != shape or not shape:
        return NotImplemented  # type: ignore[no-any-return]
    places = torch.arange(x.shape[axis], device=x.device)
    index = places.index_select(0, index.reshape(-1)).reshape(shape)  # raises for an index that is out of range
    return _picked(x, index == places.reshape([-1 if own == axis else 1 for own in range(x.dim())]), axis, keepdim=True)


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """A sum of each row, in which all but one element are 0."""
    axes = dim1 % x.dim(), dim2 % x.dim()
    rows, columns = (x.shape[axis] for axis in axes)
    if not x.is_floating_point() or offset or rows != columns:
        return NotImplemented  # type: ignore[no-any-return]
    last = torch.movedim(x, axes, (-2, -1))
    places = torch.arange(rows, device=x.device)
    return _picked(last, places[:, None] == places, x.dim() - 1, keepdim=False)


def _picked(x: Tensor, mask: Tensor, axis: int, *, keepdim: bool) -> Tensor:
    return torch.where(mask, x, 0).sum(axis, keepdim)


def _put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Values where a mask holds, which are the same wherever it does."""
    places = [place for place, one in enumerate(indices) if one is not None]
    mask = indices[places[0]] if len(places) == 1 else None
    if mask is None or mask.dtype != torch.bool:
        return NotImplemented  # type: ignore[no-any-return]
    behind = x.dim() - places[0] - mask.dim()
    if values.dim() > behind and values.shape[: values.dim() - behind].numel() != 1:
        return NotImplemented  # type: ignore[no-any-return]
    given = values.reshape(values.shape[max(0, values.dim() - behind) :])
    return where(mask.reshape([*mask.shape, *[1] * behind]), x + given if accumulate else given, x)


@functools.cache
def _of_pytorch() -> dict[Any, Callable[..., Any]]:
    return get_decompositions([aten.nll_loss_forward.packet, aten.native_dropout.packet])


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.mean.default: _mean,
    aten.mean.dim: _mean_dim,
    aten.var.correction: _variance,
    aten.std.correction: _deviation,
    aten.var_mean.correction: _with_mean(_variance),
    aten.std_mean.correction: _with_mean(_deviation),
    aten.nansum.default: _sum_without_nan,
    aten.aminmax.default: _extrema,
    aten.argmin.default: _number_of(aten.min.dim),
    aten.argmax.default: _number_of(aten.max.dim),
    aten.new_empty.default: _new(torch.empty),
    aten.new_full.default: _new(torch.full),
    aten.new_ones.default: _new(torch.ones),
    aten.new_zeros.default: _new(torch.zeros),
    aten.min.default: lambda x: torch.amin(x, tuple(range(x.dim()))),
    aten.max.default: lambda x: torch.amax(x, tuple(range(x.dim()))),
    aten.repeat.default: _repeated,
    aten.index_put.default: _put,
    aten.copy.default: lambda target, source, non_blocking=False: source.to(target.dtype).expand(target.shape),
    aten.eye.default: _eye,
    aten.eye.m: _eye,
    aten.triu.default: _triangle(lambda distance, diagonal: distance >= diagonal),
    aten.tril.default: _triangle(lambda distance, diagonal: distance <= diagonal),
    aten.squeeze.default: lambda x: _squeezed(x, range(x.dim())),
    aten.squeeze.dim: lambda x, dim: _squeezed(x, [dim]),
    aten.squeeze.dims: _squeezed,
}
OF_SOFTMAX: dict[Any, Callable[..., Any]] = {aten._softmax.default: _softmax, aten._log_softmax.default: _log_softmax}
OF_PICKS: dict[Any, Callable[..., Any]] = {aten.gather.default: _gathered_by_mask, aten.diagonal.default: _diagonal}
