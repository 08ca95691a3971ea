"""Keeps a step that is followed apart from what its caller has set, and the caller from what the step sets."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from effops.measure import without_collector
from effops.prediction.shared import Shared
from effops.pytorch import _disable_current_modes


@contextmanager
def _undetected() -> Iterator[None]:
    """Switch anomaly detection off, which reads values.

    It is one switch for all threads. Another thread may use it meanwhile, which the flag beside it tells. Then the
    switch stays as that thread has left it.
    """
    was_on, checks_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(False, not checks_nan)
    try:
        yield
    finally:
        if not torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() != checks_nan:
            torch.autograd.set_detect_anomaly(was_on, checks_nan)


UNDETECTED = Shared(_undetected)


@contextmanager
def apart() -> Iterator[None]:
    """A context with gradients, the CPU as default device, no modes and no garbage collector.

    A seed set inside is undone.
    """
    elsewhere = torch.get_default_device().type != "cpu"
    with (
        torch.inference_mode(False),
        _disable_current_modes(),
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
