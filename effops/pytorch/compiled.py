"""Interfaces of the variant `compile`, and of tiles that Inductor compiles. They take seconds to import."""

from effops.pytorch.missing import take_apart

try:
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.exc import InductorError
except (AttributeError, ImportError):
    take_apart(__name__, "compiled variants")
