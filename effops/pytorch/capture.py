"""Interfaces of programs that are followed on fake tensors: lint, budgets, scripts."""

from effops.pytorch.missing import getter, take_apart

try:
    from torch import Tensor
    from torch._C._autograd import _get_sequence_nr, _unsafe_set_version_counter
    from torch._C._functorch import is_functorch_wrapped_tensor
    from torch.nn import Module
    from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

    version_of = getter(Tensor, "_version")
    buffers_of = getter(Module(), "_buffers")
    modules_of = getter(Module(), "_modules")
    parameters_of = getter(Module(), "_parameters")
except (AttributeError, ImportError):
    take_apart(__name__, "programs on fake tensors")
