"""Interfaces of calls of ops."""

from effops.pytorch.missing import getter, reader, take_apart

try:
    from torch import Tensor, _fused_sdp_choice, _neg_view, _standard_gamma
    from torch._C import (  # type: ignore[attr-defined]
        _are_functorch_transforms_active,
        _get_dispatch_mode,
        _get_tracing_state,
        _is_alias_of,
        _len_torch_dispatch_stack,
        _TorchDispatchModeKey,
    )
    from torch._C._autograd import (
        _saved_tensors_hooks_disable,
        _saved_tensors_hooks_enable,
        _saved_tensors_hooks_get_disabled_error_message,
    )
    from torch._C._dynamo.eval_frame import reset_code
    from torch._C._functorch import (
        TransformType,
        get_interpreter_stack,
        is_gradtrackingtensor,
        is_legacy_batchedtensor,
        unwrap_if_dead,
    )
    from torch._guards import TracingContext
    from torch._prims_common import compute_elementwise_output_strides
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.autograd import forward_ad
    from torch.nn import Module
    from torch.types import _size
    from torch.utils._pytree import tree_leaves, tree_map_only
    from torch.utils.hooks import unserializable_hook

    base_of = getter(Tensor, "_base")  # what a view is one of
    dual_level = reader(forward_ad, "_current_level")  # below 0 outside of forward mode
    forward_pre_hooks = getter(Module(), "_forward_pre_hooks")
except (AttributeError, ImportError):
    take_apart(__name__, "calls of ops")
