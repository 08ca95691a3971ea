"""The memory of training: estimated, taken apart, fitted into a budget, and reduced.

A `Workload` says what a step runs. Then `anatomy` tells where its memory goes, `max_batch_size` finds the largest batch
that fits a budget, and `advise` tells what would help. `sweep` does so for models of several sizes. The step runs on
fake tensors, which take no memory. `estimate_transformer` computes a closed form instead. `device_usage` and
`summarize` tell what NVIDIA devices hold, and by what.
"""

# This folder may import `ops`, `nn`, `measure`, `prediction`, `text` and `pytorch`. Start with `workload.py` (what a
# step runs) and `anatomy.py` (where its memory goes); `batches.py`, `advise.py` and `sweep.py` ask for many anatomies.

from typing import TYPE_CHECKING, NoReturn

from effops.memory.advise import Advice, advise
from effops.memory.anatomy import Anatomy, anatomy
from effops.memory.batches import BudgetTooSmallError, MaxBatch, max_batch_size
from effops.memory.devices import device_usage, summarize
from effops.memory.formula import Details, Estimate, estimate_transformer
from effops.memory.plot import plot_anatomy
from effops.memory.sweep import Sweep, sweep
from effops.memory.workload import Workload
from effops.text import missing_name, parse_bytes

__all__ = [
    "Advice",
    "Anatomy",
    "BudgetTooSmallError",
    "Details",
    "Estimate",
    "MaxBatch",
    "Sweep",
    "Workload",
    "advise",
    "anatomy",
    "device_usage",
    "estimate_transformer",
    "max_batch_size",
    "parse_bytes",
    "plot_anatomy",
    "summarize",
    "sweep",
]


if not TYPE_CHECKING:  # a type checker knows the names

    def __getattr__(name: str) -> NoReturn:
        raise missing_name(__name__, name, __all__)
