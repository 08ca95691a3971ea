"""Runs a program on fake tensors: nothing is computed, and what the program touched is as it was before.

Real tensors stay where they are. Inside of each operator a fake tensor stands in for them.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from effops.measure import without_collector
from effops.prediction.known_values import KNOWN_TO_TRANSFORMERS
from effops.prediction.named_devices import (
    NAMED_BY_AUTOCAST,
    MissingDeviceError,
    NamedCuda,
    NamedCudaForms,
    OneDeviceRecorder,
    device_asked_for,
    is_lacking,
    missing_device,
    missing_devices_named,
)
from effops.prediction.observed_forms import SUMS_IN_PLACE
from effops.prediction.recorder import DEEP_COPIES, GENERATOR_STATES, SKIPPED_INITIALISATION
from effops.prediction.shared import COMPILED_REFUSED, CompiledFunctionError, without_logged_failures
from effops.programs.capture.assumed_values import INTEGER, OF_ARRAY, OF_INTEGER, AssumedValues, CannotFollow, at
from effops.programs.capture.ended import EndingMode
from effops.programs.capture.observed import Observed
from effops.programs.capture.places import is_raised_by_program, raised_at
from effops.programs.capture.reads import READ_IN_PYTHON
from effops.programs.capture.untouched import ZEROED, VersionedRecorder, untouched
from effops.pytorch.operators import aten
from effops.pytorch.prediction import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

FAILURES = (
    *(AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError),
    pickle.PicklingError,
)
DEPENDS_ON_VALUES = DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
# PyTorch says so of fake tensors; those errors have no class of their own.
OF_MEMORY = "the memory of a tensor: compare tensors by `is`, and give C code tensors through operators"
READS_VALUES = {
    "its data is not allocated yet": "",
    ".numpy() is not supported": f"an array of a tensor: {OF_ARRAY}",
    "cannot be converted to type int64": f"an integer: {OF_INTEGER}",  # which is NaN
    "Expected scalar.isIntegral": f"an integer: {OF_INTEGER}",
    "Cannot access data pointer of Tensor": OF_MEMORY,
    "Not available for 'meta' device type": OF_MEMORY,
    'Attempted to set the storage of a tensor on device "meta"': "a storage, or copy.copy: write x.clone()",
    "WeakValueDictionary.__init__.<locals>": "a pickle of a tensor",  # which would pickle the run
}
# What Python and PyTorch say of NaN, which stands for a number that was read.
NO_INTEGER = (
    "'float' object cannot be interpreted as an integer",
    "not float",
    "UnknownNumber",  # the class, where another one was expected
    "slice indices must be integers",
    "only integers, slices (`:`), ellipsis (`...`)",  # as indices of tensors
    "cannot convert float NaN to integer",
    "cannot convert NaN to integer ratio",
)
NAN = re.compile(r"\bnan\b")  # in what an operator says of a number that it checks
READ_ONLY = "read-only"  # NumPy says so of an array that must not be written to
# What such operators are in a program, and what to write there.
REMEDIES = {
    aten.nonzero.default: "a boolean mask as an index, or nonzero: write torch.where, or multiply by the mask",
    aten.masked_select.default: "masked_select: write torch.where, or multiply by the mask",
    aten._unique2.default: "unique: take it of numbers that the program knows",
    aten.repeat_interleave.Tensor: "repeat_interleave: give output_size=, if the program knows the sum",
    aten._local_scalar_dense.default: "a number of a tensor: keep the tensor, or have the numbers in NumPy or a list",
}


class LocalRecorder(VersionedRecorder):
    """Refuses tensors on devices that this machine lacks: a build of PyTorch may have fake ones of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = device_asked_for(func, kwargs)
        if kind is not None and is_lacking(kind):
            raise MissingDeviceError(kind)
        return super().__torch_dispatch__(func, types, args, kwargs)


class NamingRecorder(VersionedRecorder, OneDeviceRecorder):
    """Takes what a program names "cuda" for the device that is predicted, whichever that is."""

    def __init__(self, name: str, program: str, mode: FakeTensorMode, **options: Any) -> None:
        super().__init__(mode, **options)
        self.reader, self.program = name, program

    @property
    def reads_cuda(self) -> bool:
        return True


@contextmanager
def _devices(recorder: VersionedRecorder) -> Iterator[None]:
    """Names of devices are read as the one that is predicted, if one is named."""
    if not isinstance(recorder, NamingRecorder):
        yield
        return
    named = NamedCudaForms(recorder.unknown) if recorder.cuda else NamedCuda()
    with missing_devices_named(recorder), NAMED_BY_AUTOCAST, named:
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
    escapes: bool = True,
) -> Iterator[AssumedValues]:
    """A context in which everything runs on fake tensors. `name` begins its errors.

    With `device`, "cpu" or "cuda", the program may name "cuda", which then is the device that is predicted; errors call
    it a `program`. Without it the program has the names of this machine. `alone` says that no other thread draws random
    numbers meanwhile, and `escapes` that tensors may be left to somebody, who is to be told that they have no values.
    """
    mode = EndingMode(name)
    recorder = (
        LocalRecorder(mode, probe=probe, observe=observed.note)
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
                _devices(recorder),
                ZEROED,
            ):
                yield values
        except CompiledFunctionError as error:
            place = raised_at(error)
            called = f", called at {place}" if place else ""
            raise CannotFollow(
                f"{name}: what is compiled by torch.compile cannot be followed; got {error}{called}; run it "
                'uncompiled, under `torch.compiler.set_stance("force_eager")`'
            ) from error
        except CannotFollow as error:
            raise type(error)(f"{name}: {error}") from error.__cause__
        except FAILURES as error:
            told = _told(error, name, values, names_cuda=device is not None)
            if told is None:
                raise
            raise told from error
        finally:
            mode.end(escapes)
            observed.unknown |= recorder.unknown


def _told(error: Exception, name: str, values: AssumedValues, names_cuda: bool) -> Exception | None:
    """What to say in place of an error that comes of fake tensors; None if it is the program's own."""
    said, line = str(error), at(raised_at(error))
    device = None if names_cuda else missing_device(error)
    if device is not None:
        by_option = ", or run a script that names it by `effops lint --device cuda SCRIPT`" if device == "cuda" else ""
        return NotImplementedError(
            f'{name}: a function must name devices of this machine alone; got "{device}", which it lacks{line}; leave '
            f"the device out{by_option}"
        )
    if values.reads_numbers and any(text in said for text in NO_INTEGER):
        return CannotFollow(f"{name}: {INTEGER} cannot be followed without values{line}; {OF_INTEGER}")
    if values.reads_numbers and NAN.search(said) and not is_raised_by_program(error):
        return CannotFollow(
            f"{name}: a number that is read from a tensor, and that an operator checks, cannot be followed without "
            f"values{line}; take it from what the tensor was made of"
        )
    if values.lends_arrays and isinstance(error, ValueError) and READ_ONLY in said:
        return CannotFollow(
            f"{name}: an array of an argument cannot be written to, as the argument stays as it is{line}; write to "
            "a copy, by .copy()"
        )
    texts = [text for text in READS_VALUES if text in said]
    if not texts and not isinstance(error, DEPENDS_ON_VALUES):
        return None
    operator: Any = getattr(error, "func", "an operator that reads values")
    remedy = REMEDIES.get(operator, READS_VALUES[texts[0]] if texts else "")
    what = f" ({remedy})" if remedy else ""
    return CannotFollow(
        f"{name}: {operator}{what} depends on values, which a run on fake tensors does not have{line}; make shapes and "
        "branches there independent of them, or leave the line out"
    )
