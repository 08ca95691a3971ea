"""Predicted against measured memory of training steps, on the CPU: peaks of three architectures, and largest batches.

python bench/studies/memory.py
python bench/studies/memory.py --largest --json FILE

The first prints a row for every architecture, way to train and batch size. It has the predicted and the measured peak
of the tensors, how far they are apart, and the seconds that the prediction took. `--largest` also predicts the largest
batch that fits a budget. Beside it stands the largest one whose measured peak fits, found by running all sizes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from dataclasses import replace
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from parts.arguments import file_to_write
from parts.report import header
from torch import nn

from effops.commands.main import Parser
from effops.memory import Anatomy, Workload, anatomy, max_batch_size
from effops.memory.measured import measured_timeline
from effops.memory.models import ARCHITECTURES, Configuration, workload_parts
from effops.text import aligned

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"checkpoint": True},
    "bfloat16 autocast": {"autocast": torch.bfloat16},
    "2 batches a step": {"accumulation_steps": 2},
}
BATCH_SIZES = (2, 6)
REPEATS = 10


class Convolutions(nn.Sequential):
    """Three convolutions, normalised and pooled."""

    def __init__(self) -> None:
        widths = (3, 16, 32, 64)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 1))


class Recurrent(nn.Module):
    """Two layers of LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 32, 2, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layers(x)[0])
        return result


def small_workload(model: Any, shape: tuple[int, ...], result: tuple[int, ...]) -> Workload:
    return Workload(
        model=model,
        batch=lambda size: (torch.randn(size, *shape), torch.randn(size, *result)),
        loss=lambda model, batch: nn.functional.smooth_l1_loss(model(batch[0]), batch[1]),
        optimizer=torch.optim.Adam,
    )


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", default="naive", choices=("naive", "fused", "log_sparse"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--largest", action="store_true", help="also the largest batches, by brute force")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    configuration = Configuration(attention=options.attention, layers=options.layers, seq_len=options.seq_len)
    report = {**header(torch.device("cpu"), None), "configuration": vars(configuration), "peaks": peaks(configuration)}
    if options.largest:
        report["largest"] = largest(configuration)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def peaks(configuration: Configuration) -> list[dict[str, Any]]:
    rows, lines = [], [["", "batch size", "predicted bytes", "measured bytes", "off", "seconds"]]
    for architecture in ARCHITECTURES:
        for way, options in WAYS.items():
            workload = Workload(**workload_parts(architecture, configuration), **options)
            for batch_size in BATCH_SIZES:
                start = time.perf_counter()
                predicted = anatomy(workload, batch_size)
                seconds = time.perf_counter() - start
                measured = Anatomy(batch_size, measured_timeline(workload, batch_size))
                row = {
                    "architecture": architecture,
                    "way": way,
                    "batch_size": batch_size,
                    "predicted_bytes": predicted.peak_bytes,
                    "measured_bytes": measured.peak_bytes,
                    "seconds": round(seconds, 2),
                    "differences": replace(predicted, measured=measured).differences,
                }
                rows.append(row)
                off = f"{predicted.peak_bytes / measured.peak_bytes - 1:+.3%}"
                lines.append(
                    [
                        f"{architecture}, {way}",
                        str(batch_size),
                        f"{predicted.peak_bytes:,}",
                        f"{measured.peak_bytes:,}",
                        off,
                        f"{seconds:.1f}",
                    ]
                )
    repeated = {anatomy(workload, BATCH_SIZES[0]).peak_bytes for _ in range(REPEATS)}
    print(aligned(lines))
    print(
        f"\n{REPEATS} predictions of the first size of the last row: {', '.join(f'{one:,}' for one in repeated)} bytes"
    )
    return rows


def largest(configuration: Configuration) -> list[dict[str, Any]]:
    """For budgets between the peaks of some batch sizes: the predicted largest batch, and that of all that were run."""
    workloads = {name: Workload(**workload_parts(name, configuration)) for name in ARCHITECTURES}
    workloads["convolutions"] = small_workload(Convolutions, (3, 32, 32), (1,))
    workloads["LSTM"] = small_workload(Recurrent, (50, 8), (50, 1))
    rows, lines = [], [["", "budget bytes", "predicted", "by running all sizes"]]
    for name, workload in workloads.items():
        most = 8 if name in ARCHITECTURES else 24
        measured = [measured_timeline(workload, size).peak_bytes for size in range(1, most + 1)]
        for size in (most // 2, most - 1):
            budget = (measured[size - 1] + measured[size]) // 2
            fitting = max(size for size, peak in enumerate(measured, start=1) if peak <= budget)
            predicted = max_batch_size(workload, budget).batch_size
            rows.append({"workload": name, "budget_bytes": budget, "predicted": predicted, "measured": fitting})
            lines.append([name, f"{budget:,}", str(predicted), str(fitting)])
    print("\n" + aligned(lines))
    return rows


if __name__ == "__main__":
    main()
