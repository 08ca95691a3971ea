"""Interfaces of `tiled`. They take seconds to import."""

from effops.pytorch.missing import IN_TILES, getter, take_apart

try:
    from torch._C import (
        _len_torch_function_stack,
        _pop_torch_dispatch_stack,
        _pop_torch_function_stack,
        _push_on_torch_dispatch_stack,
        _push_on_torch_function_stack,
        _set_grad_enabled,
    )
    from torch._decomp import get_decompositions
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import lookup_backend, optimize
    from torch._dynamo.exc import (
        BackendCompilerFailed,
        FailOnRecompileLimitHit,
        TorchRuntimeError,
        Unsupported,
        UserError,
    )
    from torch._guards import tracing
    from torch._higher_order_ops.wrap import TagActivationCheckpoint, tag_activation_checkpoint
    from torch._ops import HigherOrderOperator
    from torch.distributions import Distribution
    from torch.fx._lazy_graph_module import _LazyGraphModule
    from torch.fx.experimental import _config as shapes_config
    from torch.fx.traceback import preserve_node_meta

    validation_of = getter(Distribution, "_validate_args")
except (AttributeError, ImportError):
    take_apart(__name__, IN_TILES)
