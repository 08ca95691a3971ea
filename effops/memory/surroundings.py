"""Isolates a step from what its caller has set in PyTorch, and the caller from what the step sets there."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from effops.measure import without_collector
from effops.prediction.shared import Shared, without_logged_failures
from effops.pytorch.prediction import _disable_current_modes


@contextmanager
def _without_anomaly_detection() -> Iterator[None]:
    """Switch anomaly detection off, which reads values.

    All threads share the switch and its second flag, `check_nan`, which has no effect while the switch is off. So this
    inverts the flag, and sees at the end whether it is still inverted. If it is not, another thread has set the switch
    meanwhile, and the switch stays as that thread has set it.
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
def isolated_from_caller() -> Iterator[None]:
    """A context with gradients, the CPU as default device, no modes and no garbage collector.

    A seed that is set inside does not last: the generator is as before at the end.
    """
    elsewhere = torch.get_default_device().type != "cpu"
    with (
        torch.inference_mode(False),
        _disable_current_modes(),
        WITHOUT_ANOMALY_DETECTION,
        torch.device("cpu") if elsewhere else nullcontext(),
        without_collector(),
        without_logged_failures(),
        _without_lasting_seed(),
    ):
        yield


@contextmanager
def _without_lasting_seed() -> Iterator[None]:
    """Put the random number generators back as they were, if somebody set a seed inside, as a workload may.

    A prediction draws no number. Without a new seed, only other threads can have changed the generators, by drawing.
    The states before would make them draw the same numbers again. So the generators are then left as they are.
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
