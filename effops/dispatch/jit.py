"""Functions compiled just in time, by TorchScript and by torch.compile."""

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from effops.dispatch.arguments import NO_OVERRIDE
from effops.pytorch.calls import TracingContext, reset_code, unserializable_hook


def script(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function in TorchScript. It is scripted on its first call."""

    @functools.cache
    def scripted() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)  # which it is from torch 2.15 on
            return torch.jit.script(function)

    def call(*args: Any) -> Tensor:
        # The optimiser would specialise the function for training. It would then lose tangents, claim gradients of
        # inputs that require none, and raise in inference mode.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            result: Tensor = scripted()(*args)
        return result

    return call


ANY = "any sizes"
FORMS = 64  # signatures whose compiled forms are kept, far more than a program calls


def compile_by_signature(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function compiled by torch.compile, twice at most for each signature.

    The signature of a call has the rank, broadcast pattern, order of strides, dtype, device and need of gradients of
    its tensors. It also has the values of the other arguments. The forms of the `FORMS` signatures that were called
    last are kept.

    The sizes of a signature's first call have a form of their own: code for given sizes takes less time, by up to a
    fifth on CPUs. All other sizes share a second form.
    """

    @functools.lru_cache(maxsize=FORMS)
    def kept(signature: Any) -> dict[Any, Callable[..., Tensor]]:
        return {}

    def call(*args: Any) -> Tensor:
        if is_compiling():  # the caller compiles this function together with the code around it
            return function(*args)
        if any(map(_is_of_a_subclass, args)):
            # PyTorch compiles a subclass for its class, and raises TypeError where it has gradients.
            returned = (type(arg) for arg in args if _is_of_a_subclass(arg) and _keeps_class(type(arg)))
            plain = call(*(arg.as_subclass(Tensor) if _is_of_a_subclass(arg) else arg for arg in args))
            result: Tensor = plain.as_subclass(next(returned, Tensor))
            return result
        grad = torch.is_grad_enabled()
        signature = tuple(
            (_layout(arg.shape, arg.stride()), arg.dtype, arg.device, grad and arg.requires_grad)
            if isinstance(arg, Tensor)
            else _constant(arg)
            for arg in args
        )
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        sizes = tuple((arg.shape, arg.stride()) for arg in tensors)
        forms = kept(signature)
        of_sizes = sizes if sizes in forms or not forms else ANY
        if of_sizes not in forms:
            forms[of_sizes] = _compile(function, args, dynamic=of_sizes is ANY)
        try:
            result = forms[of_sizes](*tensors)
        except _recompile_limit():
            # PyTorch compiles a form anew for more than the signature has, as the number of threads, but not for ever.
            forms[of_sizes] = _compile(function, args, dynamic=of_sizes is ANY)
            result = forms[of_sizes](*tensors)
        if result.requires_grad and of_sizes is not ANY:
            result.register_hook(_copied_to(result.stride()))
        return result

    return call


def _copied_to(strides: Sequence[int]) -> Callable[[Tensor], Tensor | None]:
    """A hook that gives a gradient the strides that code for given sizes takes, if it is to be differentiated.

    PyTorch would copy it into a leaf, and raises "a leaf Variable that requires grad is being used in an in-place
    operation". It copies others well.
    """

    def copied(gradient: Tensor) -> Tensor | None:
        if not gradient.requires_grad or gradient.stride() == strides:
            return None
        return gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)

    hook: Callable[[Tensor], Tensor | None] = unserializable_hook(copied)  # `torch.save` does not warn that it is lost
    return hook


def _is_of_a_subclass(arg: Any) -> bool:
    """Whether an argument is a tensor of a class that adds nothing to PyTorch's functions, as ops accept it."""
    cls = type(arg)
    if cls is Tensor or cls is Parameter or not isinstance(arg, Tensor):
        return False
    return bool(cls.__torch_dispatch__ is Tensor.__torch_dispatch__)  # else it stands for another tensor


def _keeps_class(cls: type[Tensor]) -> bool:
    """Whether PyTorch's functions of a tensor of this class return such tensors."""
    return cls.__torch_function__ is not NO_OVERRIDE


@functools.lru_cache(maxsize=4096)
def _layout(shape: Sequence[int], strides: Sequence[int]) -> tuple[Any, ...]:
    """What PyTorch compiles for, in a layout: numbers below 2, the order of strides, and axes that are dense in others.

    The axes are ordered with the innermost first. An axis is dense in the next one if their elements leave no gap.
    """
    inward = sorted((axis for axis, size in enumerate(shape) if size > 1), key=strides.__getitem__)
    dense = tuple(strides[outer] == strides[inner] * shape[inner] for inner, outer in itertools.pairwise(inward))
    sizes, steps = (tuple(min(number, 2) for number in numbers) for numbers in (shape, strides))
    return sizes, steps, tuple(inward), dense


def _constant(arg: Any) -> Any:
    """What stands for an argument in a signature. NaN equals no number, and 0.0 equals -0.0: their texts tell."""
    return arg.hex() if isinstance(arg, float) else arg


def _recompile_limit() -> type[Exception]:
    """What PyTorch raises where a form has been compiled too often."""
    from effops.pytorch.compiled import FailOnRecompileLimitHit  # takes seconds to import; a compiled form has done so

    return FailOnRecompileLimitHit


def _compile(function: Callable[..., Tensor], args: Sequence[Any], dynamic: bool) -> Callable[..., Tensor]:
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
    code = of_tensors.__code__ = of_tensors.__code__.replace()
    # PyTorch keeps what it compiled with the code object, and the code object for ever. No thread runs a function that
    # is freed, and a backward pass holds its own part.
    weakref.finalize(of_tensors, reset_code, code).atexit = False
    return torch.compile(of_tensors, backend=_inductor, dynamic=dynamic, fullgraph=True)


def _inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """TorchInductor with a backward pass that can run again, since it leaves the saved tensors as they are.

    As a rule, Inductor lets a backward pass write into the saved tensors ("donated buffers"). PyTorch then refuses
    `retain_graph=True`. The switch `torch._functorch.config.donated_buffer` belongs to the user, and is read again when
    a backward pass runs. So the list of donated buffers is emptied instead, whenever a pass is compiled.

    Views of operands are not saved, but computed again from the operands. Compiled code makes views that do not share
    the version of their operand, so that PyTorch would not see that an operand was changed before the backward pass.
    """
    from effops.pytorch.compiled import compile_fx, compile_fx_inner, functorch_config  # takes seconds to import

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
