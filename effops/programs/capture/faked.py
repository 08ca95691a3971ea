"""Runs a program on fake tensors: nothing is computed, and what the program touched is as it was before.

Real tensors stay where they are. Inside of each operator a fake tensor stands in for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from effops.measure import without_collector
from effops.prediction.known_values import KNOWN_TO_TRANSFORMERS
from effops.prediction.named_devices import (
    NAMED_BY_AUTOCAST,
    NamedCuda,
    NamedCudaForms,
    OneDeviceRecorder,
    missing_devices_named,
)
from effops.prediction.observed_forms import SUMS_IN_PLACE
from effops.prediction.recorder import DEEP_COPIES, GENERATOR_STATES, SKIPPED_INITIALISATION
from effops.prediction.shared import COMPILED_REFUSED, CompiledFunctionError, without_logged_failures
from effops.programs.capture.assumed_values import (
    OF_ARRAY,
    OF_INTEGER,
    READ_IN_PYTHON,
    AssumedValues,
    CannotFollow,
    ValuesInPython,
    at,
)
from effops.programs.capture.observed import Observed
from effops.programs.capture.places import raised_at
from effops.programs.capture.untouched import ZEROED, EndingMode, VersionedRecorder, untouched
from effops.pytorch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

aten = torch.ops.aten

DEPENDS_ON_VALUES = DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
# PyTorch says so of fake tensors; those errors have no class of their own.
READS_VALUES = {
    "its data is not allocated yet": "",
    ".numpy() is not supported": f"an array of a tensor: {OF_ARRAY}",
    "cannot be converted to type int64_t without overflow": f"an integer: {OF_INTEGER}",  # which is NaN
    "Expected scalar.isIntegral": f"an integer: {OF_INTEGER}",
}
# What such operators are in a program, and what to write there.
REMEDIES = {
    aten.nonzero.default: "a boolean mask as an index, or nonzero: write torch.where, or multiply by the mask",
    aten.masked_select.default: "masked_select: write torch.where, or multiply by the mask",
    aten._unique2.default: "unique: take it of numbers that the program knows",
    aten.repeat_interleave.Tensor: "repeat_interleave: give output_size=, if the program knows the sum",
    aten._local_scalar_dense.default: "a number of a tensor: keep the tensor, or have the numbers in NumPy or a list",
}


class NamingRecorder(VersionedRecorder, OneDeviceRecorder):
    """Takes what a program names "cuda" for the device that is predicted, whichever that is."""

    def __init__(self, name: str, program: str, mode: FakeTensorMode, **options: Any) -> None:
        super().__init__(mode, **options)
        self.reader, self.program = name, program

    @property
    def reads_cuda(self) -> bool:
        return True


@contextmanager
def _devices(recorder: VersionedRecorder, values: AssumedValues) -> Iterator[None]:
    """Names of devices are read as the one that is predicted, if one is named."""
    if not isinstance(recorder, NamingRecorder):
        yield
        return
    named = NamedCudaForms(recorder.unknown) if recorder.cuda else NamedCuda()
    with missing_devices_named(recorder), NAMED_BY_AUTOCAST, named, ValuesInPython(values):
        yield


@contextmanager
def faked(
    name: str,
    observed: Observed,
    *,
    probe: bool,
    device: str | None = None,
    program: str = "function",
    alone: bool = False,
) -> Iterator[AssumedValues]:
    """A context in which everything runs on fake tensors. `name` begins its errors.

    With `device`, "cpu" or "cuda", the program may name "cuda", which then is the device that is predicted; errors call
    it a `program`. Without it the program has the names of this machine. `alone` says that no other thread draws random
    numbers meanwhile.
    """
    mode = EndingMode(name)
    recorder = (
        VersionedRecorder(mode, probe=probe, observe=observed.note)
        if device is None
        else NamingRecorder(name, program, mode, cuda=device == "cuda", probe=probe, observe=observed.note)
    )
    observed.recorder = recorder
    recorder.enter("forward")
    values = AssumedValues(observed.sites)
    with without_collector(), without_logged_failures(), untouched(mode, recorder, alone):
        try:
            with (
                mode,
                recorder,
                values,
                GENERATOR_STATES,
                DEEP_COPIES,
                SUMS_IN_PLACE,
                COMPILED_REFUSED,
                KNOWN_TO_TRANSFORMERS,
                SKIPPED_INITIALISATION,
                READ_IN_PYTHON,
                _devices(recorder, values),
                ZEROED,
            ):
                yield values
        except CompiledFunctionError as error:
            raise CannotFollow(
                f"{name}: what is compiled by torch.compile cannot be followed; got {error}; run it uncompiled, under "
                '`torch.compiler.set_stance("force_eager")`'
            ) from error
        except RuntimeError as error:
            if isinstance(error, CannotFollow):
                raise type(error)(f"{name}: {error}") from error.__cause__
            if not isinstance(error, DEPENDS_ON_VALUES) and not any(text in str(error) for text in READS_VALUES):
                raise
            operator: Any = getattr(error, "func", "an operator that reads values")
            of_text = next((remedy for text, remedy in READS_VALUES.items() if text in str(error)), "")
            remedy = REMEDIES.get(operator, of_text)
            what = f" ({remedy})" if remedy else ""
            raise CannotFollow(
                f"{name}: {operator}{what} depends on values, which a run on fake tensors does not have"
                f"{at(raised_at(error))}; make shapes and branches there independent of them, or leave the line out"
            ) from error
        finally:
            mode.has_ended = True
            observed.unknown |= recorder.unknown
