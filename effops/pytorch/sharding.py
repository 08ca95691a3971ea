"""Interfaces of calls with DTensors."""

from effops.pytorch.missing import take_apart

try:
    from torch.distributed._functional_collectives import all_reduce
except (AttributeError, ImportError):
    take_apart(__name__, "calls with DTensors")
