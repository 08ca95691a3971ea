"""Functions compiled just in time, by TorchScript and by torch.compile."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from effops.pytorch import TracingContext


def script(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function in TorchScript. It is scripted on its first call."""

    @functools.cache
    def scripted() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.script(function)

    def call(*args: Any) -> Tensor:
        # The optimiser would specialise the function for training. It would then lose tangents, claim gradients of
        # inputs that require none, and raise in inference mode.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            result: Tensor = scripted()(*args)
        return result

    return call


def compile_by_signature(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function compiled by torch.compile with dynamic sizes, once for each signature.

    The signature of a call has the rank, broadcast pattern, dtype, device and need of gradients of its tensors. It also
    has the values of the other arguments.
    """
    objects: dict[Any, Callable[..., Tensor]] = {}

    def call(*args: Any) -> Tensor:
        if is_compiling():  # the caller compiles this function together with the code around it
            return function(*args)
        grad = torch.is_grad_enabled()
        signature = tuple(
            (tuple(min(size, 2) for size in arg.shape), arg.dtype, arg.device, grad and arg.requires_grad)
            if isinstance(arg, Tensor)
            else arg
            for arg in args
        )
        compiled = objects.get(signature)
        if compiled is None:
            compiled = objects[signature] = _compile(function, args)
        return compiled(*(arg for arg in args if isinstance(arg, Tensor)))

    return call


def _compile(function: Callable[..., Tensor], args: Sequence[Any]) -> Callable[..., Tensor]:
    """The function of the tensors among the arguments, compiled. The other arguments are constants.

    As arguments, numbers would become symbols. What compares with one is then saved for backward, not computed again.
    """
    are_tensors = [isinstance(arg, Tensor) for arg in args]
    others = [arg for arg in args if not isinstance(arg, Tensor)]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def constants() -> list[Any]:
        return others

    def of_tensors(*tensors: Tensor) -> Tensor:
        given, fixed = iter(tensors), iter(constants())
        return function(*(next(given if is_tensor else fixed) for is_tensor in are_tensors))

    # PyTorch limits recompilations per code object.
    of_tensors.__code__ = of_tensors.__code__.replace()
    return torch.compile(of_tensors, backend=_inductor, dynamic=True, fullgraph=True)


def _inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """TorchInductor with a backward pass that can run again, since it leaves the saved tensors as they are.

    As a rule, Inductor lets a backward pass write into the saved tensors ("donated buffers"). PyTorch then refuses
    `retain_graph=True`. The switch `torch._functorch.config.donated_buffer` belongs to the user, and is read again when
    a backward pass runs. So the list of donated buffers is emptied instead, whenever a pass is compiled.

    Views of operands are not saved, but computed again from the operands. Compiled code makes views that do not share
    the version of their operand, so that PyTorch would not see that an operand was changed before the backward pass.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # takes seconds to import

    # Inductor's cache does not see the emptied list. Without a tag it could return a pass that writes.
    tag = f"{torch.compiler.config.cache_key_tag} saved tensors are kept"
    tagged = functools.partial(torch.compiler.config.patch, cache_key_tag=tag)  # type: ignore[attr-defined]

    def compile_pass(*args: Any, **settings: Any) -> Any:
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []
        with tagged():  # a backward pass may be compiled later, when it first runs
            return compile_fx_inner(*args, **settings)

    with tagged(), functorch_config.patch(recompute_views=True):
        return compile_fx(graph, inputs, inner_compile=compile_pass)
