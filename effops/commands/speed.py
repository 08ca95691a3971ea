"""How long the variants of an op take on its reference sizes, and which of them is faster than the automatic choice."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from effops.commands.attempt import attempted
from effops.commands.console import Progress
from effops.dispatch.choice import choose
from effops.dispatch.op import Op
from effops.dispatch.requirements import requires_triton
from effops.measure import Pass, times
from effops.reference import reference_of

UNTIMED = ("naive", "torchscript")  # they form every term of every pair, which takes seconds and gigabytes
LEAST_GAIN = 1.1  # a smaller difference is noise
REPEATS = 10
BUDGET_S = 2.0  # seconds for each pass of a variant


@dataclass(frozen=True)
class OpSpeed:
    """Median milliseconds by variant, of the forward pass and of the forward and backward passes together.

    `automatic` is the variant that `auto` takes at these sizes. `problems` tells what a variant raised.
    """

    op: str
    device: str
    sizes: Mapping[str, int]
    automatic: str
    forward_ms: Mapping[str, float] = field(default_factory=dict)
    training_ms: Mapping[str, float] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def advice(self) -> Iterator[str]:
        """What to prefer to the automatic choice, and how much faster it is: a line for each, or none."""
        for kind, found_ms in (("forward", self.forward_ms), ("forward and backward", self.training_ms)):
            if self.automatic not in found_ms:
                continue
            best = min(found_ms, key=lambda name: found_ms[name])
            gain = found_ms[self.automatic] / found_ms[best]
            if gain >= LEAST_GAIN:
                faster = f"{gain:.1f} times as fast as {self.automatic}"
                yield f'{self.op} {kind} on {self.device}: prefer variant="{best}", {faster}'


def speed_of(op: Op, device: torch.device, right: Collection[str], progress: Progress) -> OpSpeed:
    """Time the variants in `right`, forward and backward, in float32 at the op's reference sizes."""
    sizes = reference_of(op).sizes
    found, problem = attempted(_speed_of, op, device, right, progress)
    return found or OpSpeed(op.name, str(device), sizes, "", problems={"auto": f"raised {problem}"})


def _speed_of(op: Op, device: torch.device, right: Collection[str], progress: Progress) -> OpSpeed:
    reference = reference_of(op)
    generator = torch.Generator().manual_seed(0)
    sample = reference.workload(**reference.sizes, dtype=torch.float32, device=device, generator=generator)
    args = tuple(arg.detach().requires_grad_() for arg in sample)
    call = op.prepare(*args)
    passes: dict[str, Pass] = {}
    problems: dict[str, str] = {}
    for name, variant in op.variants.items():
        interpreted = device.type == "cpu" and requires_triton in variant.requires
        if interpreted or name in UNTIMED or name not in right or variant.obstacle(call):
            continue
        progress(f"running {op.name} {name} on {device}")
        forward, backward = (Pass(partial(op, variant=name), args, backward) for backward in (False, True))
        _, problem = attempted(_run_once, backward)
        if problem:
            problems[name] = f"raised {problem}"
        else:
            passes.update({name: forward, f"{name} backward": backward})
    progress(f"timing {op.name} on {device}")
    timings = times(passes, repeats=REPEATS, budget_s=BUDGET_S, warmup=0)
    forward_ms = {name: timings[name].median_ms for name in op.variants if name in timings}
    training_ms = {name: ms + timings[f"{name} backward"].median_ms for name, ms in forward_ms.items()}
    automatic = choose(op, call, None).name
    return OpSpeed(op.name, str(device), reference.sizes, automatic, forward_ms, training_ms, problems)


def _run_once(backward: Pass) -> None:
    """Run both passes, which compiles them; a device's errors are raised here, and not by what comes next."""
    backward.prepare().run()
    if backward.device.type == "cuda":
        torch.cuda.synchronize(backward.device)
