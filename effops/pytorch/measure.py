"""Interfaces of measurements of bytes and time."""

from effops.pytorch.missing import take_apart

try:
    from torch import cuda
    from torch._C._autograd import DeviceType
    from torch.autograd.profiler_util import FunctionEvent, FunctionEventAvg
    from torch.utils import collect_env

    keep_busy = cuda._sleep
except (AttributeError, ImportError):
    take_apart(__name__, "measurements")
