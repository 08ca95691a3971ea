"""Check what every op requires of its tensor arguments. Errors name the function, the argument and the remedy."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from effops.numerics.precision import FLOATS
from effops.pytorch import _disabled_torch_function_impl

# They are named, since their modules take long to import. DTensors are sharded, and the others count as plain tensors.
_KNOWN_SUBCLASSES = frozenset(
    {
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.functional_tensor.FunctionalTensor",
        "torch.distributed._functional_collectives.AsyncCollectiveTensor",
        "torch.distributed.tensor.DTensor",
    }
)


def check_operand(function: str, argument: str, tensor: Any, *, dims: int = 0) -> None:
    """Raise unless `tensor` is a dense floating-point tensor with at least `dims` dimensions."""
    if not isinstance(tensor, Tensor):
        got, remedy = type(tensor).__name__, "use torch.as_tensor"
        if isinstance(tensor, torch.fx.Proxy):
            remedy = f'import the function by its name, and call torch.fx.wrap("{function}") in the module that does so'
        raise TypeError(f"{function}: `{argument}` must be a tensor; got {got}; {remedy}")
    if tensor.dtype not in FLOATS:
        names = ", ".join(str(dtype)[len("torch.") :] for dtype in FLOATS)
        raise TypeError(
            f"{function}: `{argument}` must be real floating point; got {tensor.dtype}; convert it to one of {names}"
        )
    check_dense(function, argument, tensor)
    if tensor.ndim < dims:
        least = "a last dimension" if dims == 1 else f"at least {dims} dimensions"
        raise ValueError(f"{function}: `{argument}` must have {least}; got {tensor.ndim}; unsqueeze it")


def check_dense(function: str, argument: str, tensor: Tensor) -> None:
    """Raise if `tensor` is sparse, nested, or of a subclass that gives PyTorch's functions another meaning."""
    if tensor.layout != torch.strided:
        raise TypeError(f"{function}: `{argument}` must be dense; got {tensor.layout}; use .to_dense()")
    if tensor.is_nested:
        raise TypeError(f"{function}: `{argument}` must be dense; got a nested tensor; use .to_padded_tensor()")
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        _check_subclass(function, argument, type(tensor))


def _check_subclass(function: str, argument: str, cls: type[Tensor]) -> None:
    """Raise if a class overrides PyTorch's functions: no variant asks it, and its values alone may mean nothing."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name in _KNOWN_SUBCLASSES:
        return
    overridden = [
        method
        for method in ("__torch_function__", "__torch_dispatch__")
        if _implementation(cls, method) not in (_implementation(Tensor, method), _disabled_torch_function_impl)
    ]
    if not overridden:
        return
    if name == "torch.nn.attention.bias.CausalBias":
        remedy = (
            "use is_causal=True for causal_upper_left, if the function has it, or a boolean mask: "
            "torch.ones(queries, keys, dtype=torch.bool).tril(), and .tril(keys - queries) for causal_lower_right"
        )
    elif "__torch_dispatch__" in overridden:
        remedy = "use the plain tensor that it stands for"
    else:
        remedy = "use .as_subclass(torch.Tensor) if its values are all that matters"
    raise TypeError(
        f"{function}: `{argument}` must be a plain tensor; got {name}, which overrides {' and '.join(overridden)}; "
        f"{remedy}"
    )


def _implementation(cls: type[Tensor], method: str) -> Any:
    """The function behind a class method, without the class to which it is bound."""
    bound = getattr(cls, method)
    return getattr(bound, "__func__", bound)


def check_devices(function: str, **tensors: Tensor) -> None:
    """Raise unless the tensors are on one device."""
    if len({tensor.device for tensor in tensors.values()}) > 1:
        got = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"{function}: tensors must be on one device; got {got}; move one")
