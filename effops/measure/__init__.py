"""Bytes, time and profiler rows of a call, or of its backward pass, on a CPU or on a CUDA device.

    work = Pass(torch.cdist, (a, b))                    # the forward pass
    back = Pass(torch.cdist, (a, b), backward=True)     # the backward pass alone
    memory(work)                                        # bytes: inputs, output, saved, temporary, peak
    times({"forward": work, "backward": back})          # milliseconds: median, least, spread
    print(profile({"forward": work, "backward": back}))

On a CPU bytes are the running sum of the allocator's events, which the profiler records: exact and the same from run to
run. A release of what was allocated before the call does not count. On CUDA bytes are the caching allocator's
statistics, whose blocks are multiples of 512 bytes. Neither sees what a library takes from the system by itself
(scratch space inside a matrix product on a CPU, the CUDA context).
"""

from typing import TYPE_CHECKING, NoReturn

# Besides what is public, the benchmark and other rooms use these.
from effops.measure.machine import available_bytes as available_bytes
from effops.measure.machine import device_model as device_model
from effops.measure.memory_of_pass import Memory, memory
from effops.measure.memory_of_pass import without_collector as without_collector
from effops.measure.passes import Pass
from effops.measure.passes import storage_bytes as storage_bytes
from effops.measure.passes import tensors_of as tensors_of
from effops.measure.passes import upstream_gradient as upstream_gradient
from effops.measure.profiles import Profile, ProfileRow, profile
from effops.measure.time_of_pass import Timing, times
from effops.measure.time_of_pass import copy_bandwidth_gbps as copy_bandwidth_gbps
from effops.text import missing_name

__all__ = ["Memory", "Pass", "Profile", "ProfileRow", "Timing", "memory", "profile", "times"]


if not TYPE_CHECKING:  # a type checker knows the names

    def __getattr__(name: str) -> NoReturn:
        raise missing_name(__name__, name, __all__)
