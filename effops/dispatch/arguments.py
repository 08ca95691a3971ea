"""Check what every op requires of its tensor arguments. Errors name the function, the argument and the remedy."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from effops.numerics.precision import FLOATS, INTEGERS

# They are named, since their modules take long to import. DTensors are sharded, and the others count as plain tensors.
_KNOWN_SUBCLASSES = frozenset(
    {
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.functional_tensor.FunctionalTensor",
        "torch.distributed._functional_collectives.AsyncCollectiveTensor",
        "torch.distributed.tensor.DTensor",
    }
)

NO_OVERRIDE = Parameter.__torch_function__  # of classes that leave functions to tensors
WITHOUT_FLOAT64 = frozenset({"mps"})


def check_operand(function: str, argument: str, tensor: Any, *, dims: int = 0) -> None:
    """Raise unless `tensor` is a dense floating-point tensor with at least `dims` dimensions."""
    if not isinstance(tensor, Tensor):
        got, remedy = type(tensor).__name__, conversion(tensor)
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
        raise ValueError(f"{function}: `{argument}` must have {least}; got shape {tuple(tensor.shape)}; unsqueeze it")


def conversion(given: Any, otherwise: str = "give a tensor") -> str:
    """What to give in place of what is no tensor, and perhaps can become one of real floating-point numbers."""
    if isinstance(given, (list, tuple)) and given and all(isinstance(one, Tensor) for one in given):
        if len({one.shape for one in given}) == 1:
            return "use torch.stack"
        return "call the function for each of these tensors, whose shapes differ; or pad them to one, and torch.stack"
    dtype = _dtype_as_tensor(given)
    if dtype in FLOATS:
        return "use torch.as_tensor"
    return "use torch.as_tensor(..., dtype=torch.float32)" if dtype in INTEGERS or dtype == torch.bool else otherwise


def _dtype_as_tensor(given: Any) -> torch.dtype | None:
    """The dtype of the tensor that can be made of something; None if there is none."""
    try:
        return torch.as_tensor(given).dtype
    except (RuntimeError, TypeError, ValueError):
        return None


def reshaped(argument: str, shape: Sequence[int], fits: Callable[[Sequence[int]], bool]) -> str:
    """Ask for an argument without its last axis of size 1, or transposed, if its shape fits so; else empty."""
    if tuple(shape[-1:]) == (1,) and fits(shape[:-1]):
        return f"give {argument}.squeeze(-1)"
    *batch, rows, columns = shape if len(shape) > 1 else (0, 0)
    return f"give {argument}.mT" if rows != columns and fits((*batch, columns, rows)) else ""


def masking_keys(argument: str, shape: Sequence[int], keys: int, rank: int) -> str:
    """How a mask excludes keys for all queries of `rank` axes: which it does where it has an axis of keys alone."""
    if 1 < len(shape) < rank and shape[-1] == keys:
        places = ":, " * (len(shape) - 1) + "None, " * (rank - len(shape)) + ":"
        return f"to mask keys for all queries give {argument}[{places}]"
    return "give (*batch, queries, keys), or (*batch, 1, keys) to mask keys for all queries"


def check_mask(function: str, argument: str, mask: Any, meaning: str) -> None:
    """Raise unless `mask` is a dense tensor, boolean or floating-point. `meaning` says where a boolean one is True."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        check_dense(function, argument, mask)
        return
    if isinstance(mask, (bool, int, float)):
        name = "is_causal" if isinstance(mask, bool) else "dropout_p"
        raise TypeError(
            f"{function}: `{argument}` must be a tensor or None; got {mask!r}; give other arguments by name, as "
            f"{name}={mask!r}"
        )
    if not isinstance(mask, Tensor) and (dtype := _dtype_as_tensor(mask)) is not None and dtype not in FLOATS:
        raise TypeError(
            f"{function}: `{argument}` must be a tensor, boolean or of floating-point numbers that are added to the "
            f"scores; got {type(mask).__name__}; give torch.as_tensor(mask, dtype=torch.bool), True {meaning}"
        )
    if isinstance(mask, Tensor) and mask.dtype in INTEGERS:
        raise TypeError(
            f"{function}: `{argument}` must be boolean, or floating-point numbers that are added to the scores; got "
            f"{mask.dtype}; give mask.bool() if it is 1, or ~mask.bool() if it is 0, {meaning}"
        )
    check_operand(function, argument, mask)


def check_dense(function: str, argument: str, tensor: Tensor) -> None:
    """Raise if `tensor` is sparse, nested, or of a subclass that gives PyTorch's functions another meaning."""
    if tensor.layout != torch.strided:
        raise TypeError(f"{function}: `{argument}` must be dense; got {tensor.layout}; use .to_dense()")
    if tensor.is_nested:
        raise TypeError(f"{function}: `{argument}` must be dense; got a nested tensor; use .to_padded_tensor()")
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        _check_subclass(function, argument, type(tensor))


def is_causal_bias(cls: type) -> bool:
    """Whether a class is that of PyTorch's masks that name a triangle and hold no values."""
    return cls.__module__ == "torch.nn.attention.bias" and cls.__qualname__ == "CausalBias"


def _check_subclass(function: str, argument: str, cls: type[Tensor]) -> None:
    """Raise if a class overrides PyTorch's functions: no variant asks it, and its values alone may mean nothing."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name in _KNOWN_SUBCLASSES:
        return
    overridden = [  # by identity: before torch 2.13 Dynamo cannot compare methods
        method
        for method in ("__torch_function__", "__torch_dispatch__")
        if _implementation(cls, method) is not _implementation(Tensor, method)
        and _implementation(cls, method) is not NO_OVERRIDE
    ]
    if not overridden:
        return
    if is_causal_bias(cls):
        remedy = "give it as attn_mask of an attention of effops, or give is_causal=True or a boolean mask"
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


def check_new_tensors(function: str, device: Any, dtype: Any) -> None:
    """Raise unless new tensors can be of this device and dtype; None is the default."""
    if isinstance(device, torch.dtype):
        raise TypeError(f"{function}: `device` must be a device; got {device}; give dtype={device}")
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        raise TypeError(
            f'{function}: `device` must be a device; got {device!r}; give one, as "cpu" or "cuda"'
        ) from None
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(f"{function}: `dtype` must be real floating point; got {dtype!r}; give torch.float32")


def check_devices(function: str, **tensors: Tensor) -> None:
    """Raise unless the tensors are on one device."""
    if len({tensor.device for tensor in tensors.values()}) > 1:
        got = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"{function}: tensors must be on one device; got {got}; move one")


def check_float64(function: str, argument: str, tensor: Tensor) -> None:
    """Raise if the device of a tensor has no float64, which PyTorch tells without a remedy."""
    if tensor.device.type in WITHOUT_FLOAT64:
        raise NotImplementedError(
            f"{function}: `{argument}` must be on a device with float64, in which a part is computed; got "
            f"{tensor.device}; move the operands to the CPU, with .cpu(), and the result back"
        )


def check_order(
    function: str,
    arguments: Mapping[str, Any],
    vectors: Sequence[str],
    check: Callable[..., object],
    error: TypeError | ValueError,
) -> None:
    """Raise if arguments are in another order: one that is no vector stands in the place of a vector, and reversely.

    It is asked where `check`, a function of the arguments, has raised `error`. Unless that is about a type, they are in
    another order too if it accepts them in another one. `arguments` are all operands in the order of the function.
    `vectors` names those that share their last dimension.
    """
    for name, other in ((name, other) for name in vectors for other in arguments if other not in vectors):
        given, candidate = arguments[name], arguments[other]
        size = _last_dimension(candidate)
        alike = [one for one in vectors if one != name and _last_dimension(arguments[one]) == size]
        if size is None or not alike or _last_dimension(given) == size:
            continue
        ndim = given.ndim if isinstance(given, Tensor) else 0
        if candidate.ndim > ndim or (candidate.ndim == ndim and given.shape[-1] == 1):
            raise_order(function, arguments, f"`{other}` has the last dimension of `{alike[0]}`, and `{name}` has not")
    for order in itertools.permutations(arguments.values()) if isinstance(error, ValueError) else ():
        try:
            check(*order)
        except (TypeError, ValueError):
            continue
        raise_order(function, arguments, f"they fit as {described(dict(zip(arguments, order)))}")


def raise_order(function: str, arguments: Mapping[str, Any], reason: str) -> None:
    """Raise the error of arguments in another order."""
    raise ValueError(
        f"{function}: arguments must have the order {', '.join(arguments)}; got {described(arguments)}: {reason}; "
        "reorder them, or give them by name"
    ) from None


def described(arguments: Mapping[str, Any]) -> str:
    """The shapes of tensors by name, and other arguments as they are."""
    return ", ".join(
        f"{name} {tuple(given.shape) if isinstance(given, Tensor) else repr(given)}"
        for name, given in arguments.items()
    )


def _last_dimension(given: Any) -> int | None:
    return given.shape[-1] if isinstance(given, Tensor) and not given.is_nested and given.ndim else None
