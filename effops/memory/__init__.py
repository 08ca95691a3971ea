"""The memory of training: estimated, taken apart, fitted into a budget, and reduced."""

from effops.memory.anatomy import Anatomy, anatomy
from effops.memory.batches import MaxBatch, max_batch_size, parse_bytes
from effops.memory.workload import Workload

__all__ = ["Anatomy", "MaxBatch", "Workload", "anatomy", "max_batch_size", "parse_bytes"]
