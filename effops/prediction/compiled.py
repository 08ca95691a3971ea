"""Refuses functions that torch.compile compiles: what TorchInductor allocates for them is not predicted.

Under a dispatch mode, as in a prediction, torch.compile runs such a function uncompiled, without a word. It also
remembers never to compile it, until `torch._dynamo.reset()`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from effops.prediction.allocations import Allocations
from effops.prediction.shared import Shared
from effops.pytorch import _get_current_dispatch_mode_stack


class CompiledFunctionError(NotImplementedError):
    """A prediction came to a compiled function."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Let torch.compile ask `refuse` where it would compile a frame of a thread that predicts."""
    from torch._dynamo import eval_frame, trace_rules  # takes seconds to import; a fake mode has done so
    from torch._dynamo.types import ConvertFrameReturn

    callback_from_stance = eval_frame._callback_from_stance

    def refuse(frame: Any, *state: Any) -> ConvertFrameReturn:
        if trace_rules.check(frame.f_code):  # a frame of PyTorch's own, on the way to the compiled function
            return ConvertFrameReturn()
        code = frame.f_code
        raise CompiledFunctionError(f"`{code.co_name}` in {code.co_filename}, line {code.co_firstlineno}")

    def callback_of_thread(callback: Any) -> Any:
        found = callback_from_stance(callback)
        predicts = any(isinstance(mode, Allocations) for mode in _get_current_dispatch_mode_stack())
        return refuse if predicts and callable(found) else found

    # A frame is refused, not the call: so torch.compile leaves the call as after any error, with its state in order.
    with mock.patch.object(eval_frame, "_callback_from_stance", callback_of_thread):
        yield


# All compiled functions pass this place, however they came to be compiled. Those of other threads are compiled as ever.
COMPILED_REFUSED = Shared(_refusing)
