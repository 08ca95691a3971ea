"""Small calls of PowerSpherical against the package `power_spherical`, interleaved in one run on one thread.

python bench/studies/small_calls.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import power_spherical
import torch
from parts.arguments import file_to_write
from parts.report import header
from torch import Tensor

import effops
from effops.measure import without_collector
from effops.text import aligned

SHAPES = (64, 2), (256, 64), (1024, 128)
COMPONENTS = 1, 64
ROUNDS, LEAST_ROUND_S = 41, 0.01
CLASSES = {"effops": effops.distributions.PowerSpherical, "package": power_spherical.PowerSpherical}

Calls = dict[str, Callable[[], object]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write the times there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for components in COMPONENTS:
        for points, dimension in SHAPES:
            for name, calls in calls_of(components, points, dimension).items():
                row = {"call": name, "components": components, "points": points, "dimension": dimension}
                rows.append(row | compare(calls))
    rows.append({"call": "training step", "components": 32, "points": 64, "dimension": 2} | compare(training_steps()))
    print(aligned([("call", "components", "(B, D)", "effops", "package", "ratio"), *map(cells, rows)]))
    if options.json:
        options.json.write_text(json.dumps({**header(torch.device("cpu"), None), "rows": rows}, indent=1) + "\n")


def cells(row: dict[str, Any]) -> Sequence[str]:
    size = f"({row['points']}, {row['dimension']})"
    times = (f"{row[name]:.0f} us" for name in CLASSES)
    return row["call"], str(row["components"]), size, *times, f"{row['ratio']:.2f}"


def directions(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(shape), dim=-1)


def calls_of(components: int, points: int, dimension: int) -> dict[str, Calls]:
    """Calls of both classes, by what is called."""
    batch = () if components == 1 else (components,)
    loc, scale = directions(*batch, dimension), torch.full(batch, 10.0)
    x = directions(points, *(1 for _ in batch), dimension)
    leaves = tuple(tensor.clone().requires_grad_() for tensor in (loc, scale, x))
    existing = {name: of_class(loc, scale) for name, of_class in CLASSES.items()}
    dout = torch.randn(points, *batch)

    def constructed(of_class: Any) -> Callable[[], object]:
        return lambda: of_class(loc, scale).log_prob(x)

    def trained(of_class: Any) -> Callable[[], object]:
        return lambda: torch.autograd.grad(of_class(*leaves[:2]).log_prob(leaves[2]), leaves, dout)

    def evaluated(distribution: Any) -> Callable[[], object]:
        return lambda: distribution.log_prob(x)

    def pulled_back(distribution: Any) -> Callable[[], object]:
        return lambda: torch.autograd.grad(distribution.log_prob(leaves[2]), leaves[2], dout)

    return {
        "constructed, forward": {name: constructed(of_class) for name, of_class in CLASSES.items()},
        "constructed, forward and backward": {name: trained(of_class) for name, of_class in CLASSES.items()},
        "existing, forward": {name: evaluated(one) for name, one in existing.items()},
        "existing, gradient of x": {name: pulled_back(one) for name, one in existing.items()},
    }


def training_steps() -> Calls:
    """Steps of a loop over 32 components, each an object of its own, without the patch and with it."""
    x = directions(64, 2)
    locs, scales = directions(32, 2).requires_grad_(), torch.full((32,), 10.0, requires_grad=True)
    optimizer = torch.optim.SGD([locs, scales], lr=1e-6)

    def step() -> None:
        parts = zip(torch.nn.functional.normalize(locs, dim=-1), scales)
        densities = [power_spherical.PowerSpherical(loc, scale).log_prob(x) for loc, scale in parts]
        optimizer.zero_grad()
        (-torch.stack(densities).logsumexp(0).mean()).backward()
        optimizer.step()

    def patched_step() -> None:
        with effops.patch_power_spherical():
            step()

    return {"effops": patched_step, "package": step}


def compare(calls: Calls) -> dict[str, float]:
    """The median microseconds of each call, and the median ratio within a round."""
    number = max(1, round(LEAST_ROUND_S / timeit.timeit(calls["package"], number=1)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with without_collector():
        for _ in range(ROUNDS):
            for name, call in calls.items():
                samples[name].append(timeit.timeit(call, number=number) * 1e6 / number)
    ratio = statistics.median(a / b for a, b in zip(samples["effops"], samples["package"]))
    return {name: statistics.median(some) for name, some in samples.items()} | {"ratio": ratio}


if __name__ == "__main__":
    main()
