"""Which variants were run on which kind of device. `explain` and `effops doctor` say so where one never was."""

from collections.abc import Mapping

import torch

# Tests run every variant on a CPU. A variant joins a set once its results and gradients were right on such a device.
# `effops doctor` looks for these kinds of devices, and for no other.
RUN_ON: Mapping[str, frozenset[str]] = {
    "a CUDA GPU": frozenset(),
    "an AMD GPU": frozenset(),
}
TESTED = ("cpu", "meta")


def never_run_on(variant: str, device: torch.device) -> str:
    """The kind of the device, such as "a CUDA GPU", if the variant was never run on one; else empty."""
    if device.type in TESTED:
        return ""
    kind = f"a device of type {device.type}"
    if device.type == "cuda":
        kind = "an AMD GPU" if torch.version.hip else "a CUDA GPU"
    return "" if variant in RUN_ON.get(kind, ()) else kind
