"""PyTorch's private APIs that effops uses, by the names that PyTorch gives them; seen in torch 2.13.

They may change with any release: a version that lacks one fails here. This file imports nothing of effops, and wraps
nothing, so that no call costs more.
"""

from torch import _VF, Tensor, _fused_sdp_choice, _neg_view, _standard_gamma, ops
from torch._C import (  # type: ignore[attr-defined]
    DisableTorchFunction,
    _are_functorch_transforms_active,
    _ConvBackend,
    _current_autograd_node,
    _disabled_torch_function_impl,
    _DisableTorchDispatch,
    _get_dispatch_mode,
    _get_float32_matmul_precision,
    _get_tracing_state,
    _is_alias_of,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _pop_torch_dispatch_stack,
    _pop_torch_function_stack,
    _push_on_torch_dispatch_stack,
    _push_on_torch_function_stack,
    _select_conv_backend,
    _storage_Use_Count,
    _TorchDispatchModeKey,
)
from torch._C._autograd import (
    DeviceType,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    _get_sequence_nr,
    _saved_tensors_hooks_disable,
    _saved_tensors_hooks_enable,
    _saved_tensors_hooks_get_disabled_error_message,
    _unsafe_set_version_counter,
)
from torch._C._dynamo.eval_frame import reset_code
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    is_legacy_batchedtensor,
    unwrap_if_dead,
)
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch._guards import TracingContext, tracing
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._prims_common import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    compute_elementwise_output_strides,
    elementwise_dtypes,
)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch.autograd import (
    forward_ad,  # its `_current_level` changes: read it from the module, when it is needed
    profiler,  # so does its `_is_profiler_enabled`, which is that of all threads
)
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.nn.init import _no_grad_trunc_normal_
from torch.nn.modules.batchnorm import _BatchNorm
from torch.types import _size
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map_only

is_non_overlapping_and_dense = ops.aten.is_non_overlapping_and_dense.default
softmax_backward = ops.aten._softmax_backward_data.out
tensor_use_count = Tensor._use_count  # type: ignore[attr-defined]

__all__ = [
    "ELEMENTWISE_TYPE_PROMOTION_KIND",
    "_VF",
    "BackwardCFunction",
    "DataDependentOutputException",
    "DeviceType",
    "DisableTorchFunction",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "ProfilerConfig",
    "ProfilerState",
    "TorchDispatchMode",
    "TracingContext",
    "TransformType",
    "UnsupportedOperatorException",
    "_BatchNorm",
    "_ConvBackend",
    "_DisableTorchDispatch",
    "_ExperimentalConfig",
    "_LazyGraphModule",
    "_TorchDispatchModeKey",
    "_are_functorch_transforms_active",
    "_create_grouped_mm_output_tensor",
    "_current_autograd_node",
    "_disable_current_modes",
    "_disable_profiler_legacy",
    "_disabled_torch_function_impl",
    "_enable_profiler_legacy",
    "_engine_run_backward",
    "_fused_sdp_choice",
    "_get_current_dispatch_mode_stack",
    "_get_dispatch_mode",
    "_get_float32_matmul_precision",
    "_get_sequence_nr",
    "_get_tracing_state",
    "_is_alias_of",
    "_len_torch_dispatch_stack",
    "_len_torch_function_stack",
    "_neg_view",
    "_no_grad_trunc_normal_",
    "_pop_torch_dispatch_stack",
    "_pop_torch_function_stack",
    "_push_on_torch_dispatch_stack",
    "_push_on_torch_function_stack",
    "_saved_tensors_hooks_disable",
    "_saved_tensors_hooks_enable",
    "_saved_tensors_hooks_get_disabled_error_message",
    "_select_conv_backend",
    "_size",
    "_standard_gamma",
    "_storage_Use_Count",
    "_unsafe_set_version_counter",
    "compute_elementwise_output_strides",
    "elementwise_dtypes",
    "forward_ad",
    "get_interpreter_stack",
    "in_kernel_invocation_manager",
    "is_functorch_wrapped_tensor",
    "is_gradtrackingtensor",
    "is_legacy_batchedtensor",
    "is_non_overlapping_and_dense",
    "profiler",
    "reset_code",
    "softmax_backward",
    "tensor_use_count",
    "tracing",
    "tree_leaves",
    "tree_map_only",
    "unwrap_if_dead",
]
