"""Interfaces of predictions of compiled functions. They take seconds to import, unless a fake mode has done so."""

from effops.pytorch.missing import reader, take_apart

try:
    from torch._dynamo import eval_frame, trace_rules
    from torch._dynamo.types import ConvertFrameReturn

    callback_from_stance = eval_frame._callback_from_stance
    stance = reader(eval_frame, "_stance")
except (AttributeError, ImportError):
    take_apart(__name__, "predictions of compiled functions")
