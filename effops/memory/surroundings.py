"""Keeps a step apart from what its caller has set in PyTorch, and the caller from what the step sets there."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from effops.measure import without_collector
from effops.prediction.shared import Shared
from effops.pytorch import _disable_current_modes


@contextmanager
def _without_anomaly_detection() -> Iterator[None]:
    """Switch anomaly detection off, which reads values.

    It is one switch for all threads. Its second flag, which says nothing while the switch is off, is turned as a mark.
    If the mark is gone at the end, another thread has used the switch, which then stays as that thread has left it.
    """
    was_on, checks_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(False, not checks_nan)
    try:
        yield
    finally:
        if not torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() != checks_nan:
            torch.autograd.set_detect_anomaly(was_on, checks_nan)


WITHOUT_ANOMALY_DETECTION = Shared(_without_anomaly_detection)


@contextmanager
def apart() -> Iterator[None]:
    """A context with gradients, the CPU as default device, no modes and no garbage collector.

    A seed that is set inside is undone at the end.
    """
    elsewhere = torch.get_default_device().type != "cpu"
    with (
        torch.inference_mode(False),
        _disable_current_modes(),
        WITHOUT_ANOMALY_DETECTION,
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
