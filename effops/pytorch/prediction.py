"""Interfaces of predictions of memory."""

import torch

from effops.pytorch.missing import PREDICTIONS, caller, getter, reader, take_apart

try:
    from torch import Tensor, UntypedStorage, ops
    from torch._C import (
        DisableTorchFunction,
        _current_autograd_node,
        _DisableTorchDispatch,
        _select_conv_backend,
        _storage_Use_Count,
    )
    from torch._C import __file__ as library_path
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
    from torch._meta_registrations import _create_grouped_mm_output_tensor
    from torch._ops import OpOverload
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        UnsupportedOperatorException,
        in_kernel_invocation_manager,
    )
    from torch.amp import autocast_mode
    from torch.autograd import profiler
    from torch.autograd.function import BackwardCFunction
    from torch.autograd.graph import Node, _engine_run_backward
    from torch.cuda.amp.common import amp_definitely_not_available
    from torch.fx.node import map_arg
    from torch.nn.init import _no_grad_trunc_normal_
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext, _device_constructors
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    autocast_enabled = getter(autocast_mode.autocast("cpu"), "_enabled")
    cast_by_autocast = autocast_mode._cast
    clear_cached_data = Tensor._clear_non_serializable_cached_data
    is_zero_tensor = Tensor._is_zerotensor
    handle_of = getter(UntypedStorage, "_cdata")  # equal for one storage, also where it has no memory
    is_profiled = reader(profiler, "_is_profiler_enabled")  # in any thread
    schema_of = getter(ops.aten.add.Tensor, "_schema")
    sequence_number = caller(Node, "_sequence_nr")
    tensor_use_count = Tensor._use_count  # type: ignore[attr-defined]
except (AttributeError, ImportError):
    take_apart(__name__, PREDICTIONS)

# Before torch 2.13 a profile warns unless it keeps the events of all its cycles, with which it ends more slowly.
KEEPS_EVENTS = torch.__version__ < "2.13"
