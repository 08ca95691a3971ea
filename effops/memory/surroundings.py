"""Keeps a step that is followed apart from what its caller has set, and the caller from what the step sets."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from effops.measure import without_collector
from effops.prediction.shared import Shared

# Anomaly detection reads values, and is one switch for all threads: each enters, also where it is off already.
UNDETECTED = Shared(lambda: torch.autograd.set_detect_anomaly(False))


@contextmanager
def apart() -> Iterator[None]:
    """A context with gradients, the CPU as default device, and no garbage collector. A seed set inside is undone."""
    elsewhere = torch.get_default_device().type != "cpu"
    with (
        torch.inference_mode(False),
        UNDETECTED,
        torch.device("cpu") if elsewhere else nullcontext(),
        without_collector(),
        _seeds_undone(),
    ):
        yield


@contextmanager
def _seeds_undone() -> Iterator[None]:
    """Undo `torch.manual_seed`, which a workload may call.

    A prediction draws no number. So the state of the generator is left alone where nobody has set a seed: other threads
    may have drawn numbers meanwhile, and a former state would repeat them.
    """
    seed, state = torch.initial_seed(), torch.random.get_rng_state()
    on_cuda = torch.cuda.is_initialized()
    states = torch.cuda.get_rng_state_all() if on_cuda else []
    try:
        yield
    finally:
        as_seeded = torch.Generator("cpu").manual_seed(torch.initial_seed()).get_state()
        if torch.initial_seed() != seed or torch.equal(torch.random.get_rng_state(), as_seeded):
            torch.random.set_rng_state(state)
            if on_cuda:
                torch.cuda.set_rng_state_all(states)
