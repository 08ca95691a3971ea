"""Published figures of training memory beside what effops.memory predicts of the same steps, without running any.

    python examples/memory_tables.py                    # all of them
    python examples/memory_tables.py bert parameters    # some
    python examples/memory_tables.py --json FILE        # and write them there

Nothing is fitted: where a figure is off, it stands here as it is.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from effops.memory import Anatomy, Details, Workload, anatomy, estimate_transformer, max_batch_size, sweep
from effops.memory.models import Configuration, bert_large, workload_parts
from effops.text import aligned

MIB, GIB = 2**20, 2**30
BUDGET = "5 GiB"

Rows = Sequence[Sequence[str]]


def printed(*rows: Sequence[str]) -> Rows:
    print(aligned(rows))
    return rows


def architecture(name: str, **sizes: Any) -> Workload:
    return Workload(**workload_parts(name, Configuration(**sizes)))


def batches() -> Rows:
    """The largest batch of three transformers, a power of two, in the forms of CUDA. The published ones were found on a
    GPU with 6.2 GiB occupied. How much of that tensors took was not published; with this budget of tensors all come
    out."""
    published = {
        ("encoder_only_tst", 256): 64,
        ("enc2dec_tst", 256): 32,
        ("tst", 256): 32,
        ("encoder_only_tst", 1024): 8,
    }
    rows = [("architecture", "length", "published", f"largest in {BUDGET}", "its peak", "the next one's")]
    for (name, length), batch in published.items():
        sizes = {} if length == 256 else {"layers": 6, "d_ff": 1024}
        workload = architecture(name, seq_len=length, **sizes)
        found = max_batch_size(workload, BUDGET, budget_means="tensors", device="cuda", power_of_two=True)
        peaks = (found.predicted_peak_bytes or 0, found.next_peak_bytes or 0)
        title = ", ".join((name, *(f"{key}={size}" for key, size in sizes.items())))
        rows.append((title, str(length), str(batch), str(found.batch_size), *(f"{one / GIB:.2f} GiB" for one in peaks)))
    return printed(*rows)


def attention() -> Rows:
    """The largest batch with other attention. The published log-sparse column is an estimate, batch x length /
    log(length)^2. Beside it is what the operation itself takes, and fused attention, which computes what naive does."""
    published = {"encoder_only_tst": 532, "enc2dec_tst": 266, "tst": 266}
    rows = [("architecture", "log-sparse, published", "log-sparse", "fused")]
    for name, batch in published.items():
        found = (
            max_batch_size(architecture(name, attention=kind), BUDGET, budget_means="tensors", device="cuda").batch_size
            for kind in ("log_sparse", "fused")
        )
        rows.append((name, str(batch), *map(str, found)))
    return printed(*rows)


class EarlierAdamW(torch.optim.AdamW):
    """AdamW by the defaults of PyTorch until 2.0: parameter by parameter, and gradients are zeroed, never released."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, foreach=False)

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


def bert() -> Rows:
    """BERT-large at length 512, AdamW: MiB that the device holds, with the context of each machine. Until PyTorch 2.0
    gradients were kept between steps, and updates made parameter by parameter; the guide is older than that."""
    return printed(("device holds, MiB", "published", "before 2.0", "off", "since", "off"), *_bert_rows())


def _bert_rows() -> Iterable[tuple[str, ...]]:
    guide, notebook = 1343, 1276
    plain, checkpointed = bert_large(), bert_large(checkpointing=True)
    weights = (
        anatomy(Workload(model=plain["model"], batch=plain["batch"]), 1, device="cuda").categories["weights"] // MIB
    )
    for context, published in ((guide, 2631), (notebook, 2564)):
        yield _compared(f"weights (context of {context})", published, context + weights, context + weights)
    known: dict[tuple[int, int, bool, type], Anatomy] = {}
    for context, batch_size, steps, saves, published in (
        (guide, 4, 1, False, 14949),
        (guide, 1, 4, False, 8681),
        (guide, 1, 4, True, 6775),
        (notebook, 4, 1, False, 12852),
    ):
        found = []
        for optimizer in (EarlierAdamW, torch.optim.AdamW):
            key = batch_size, steps, saves, optimizer
            if key not in known:
                parts = {**(checkpointed if saves else plain), "optimizer": optimizer}
                workload = Workload(**parts, accumulation_steps=min(steps, 2))  # further batches find the same memory
                known[key] = anatomy(workload, batch_size, device="cuda", context_bytes=0)
            found.append(context + known[key].device_bytes // MIB)
        name = f"{steps} x {batch_size}" + (", checkpointed" if saves else "") + f" (context of {context})"
        yield _compared(name, published, *found)


def _compared(name: str, published: int, then: int, now: int) -> tuple[str, ...]:
    return (
        name,
        f"{published:,}",
        *(cell for one in (then, now) for cell in (f"{one:,}", f"{one / published - 1:+.1%}")),
    )


def rough() -> Rows:
    """The rough formula in both readings, and the detailed one, against the predicted peak of the encoder's step in
    float32: MiB, and how many times the peak."""
    rows = [("layers, heads, d_model, length, batch", "weights + activations", "weights + 2 x", "detailed", "peak")]
    for layers, heads, d_model, length, batch in (
        (8, 8, 64, 256, 8),
        (8, 8, 64, 64, 32),
        (4, 4, 256, 128, 4),
        (2, 2, 64, 16, 64),
    ):
        sizes = {"layers": layers, "heads": heads, "d_model": d_model, "seq_len": length}
        peak = anatomy(architecture("encoder_only_tst", **sizes), batch, device="cuda").peak_bytes
        arguments = (layers, heads, d_model // heads, batch, length)
        readings = estimate_transformer(*arguments).readings
        details = Details(d_ff=Configuration.d_ff, norm="composed")
        formulas = (
            readings["weights + activations"],
            readings["weights + 2 x activations"],
            estimate_transformer(*arguments, formula="detailed", details=details).total_bytes,
        )
        cells = (f"{one / MIB:.1f} (x {one / peak:.2f})" for one in formulas)
        rows.append((f"{layers}, {heads}, {d_model}, {length}, {batch}", *cells, f"{peak / MIB:.1f}"))
    return printed(*rows)


def parameters() -> Rows:
    """Bytes a parameter, of large matrices at batch size 1. The optimizer of 8-bit states is bitsandbytes', by its
    documentation; the published 2 leave out a statistic of each block."""
    from effops.memory.optimizers import AdamW8bit

    def step(optimizer: Callable[..., torch.optim.Optimizer] | None, autocast: torch.dtype | None = None) -> Anatomy:
        training = (
            {} if optimizer is None else {"loss": lambda model, batch: model(batch).sum(), "optimizer": optimizer}
        )
        workload = Workload(
            model=lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))),
            batch=lambda size: torch.randn(size, width, requires_grad=True),  # as inside of a model
            autocast=autocast,
            **training,
        )
        return anatomy(workload, 1, device="cuda")

    def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, momentum=0.9)

    width, layers = 1024, 4
    count = layers * width**2
    plain, mixed = step(torch.optim.AdamW), step(torch.optim.AdamW, torch.bfloat16)
    copies = mixed.instants["end of forward"]["saved activations"]
    rows: Mapping[str, tuple[int, int]] = {
        "weights, float32": (4, plain.categories["weights"]),
        "weights, mixed precision": (6, mixed.categories["weights"] + copies),
        "AdamW": (8, plain.categories["optimizer states"]),
        "AdamW with 8-bit states": (2, step(AdamW8bit).categories["optimizer states"]),
        "SGD with momentum": (4, step(momentum).categories["optimizer states"]),
        "gradients": (4, plain.categories["gradients"]),
        "AdamW training in mixed precision": (
            18,
            sum(mixed.categories[one] for one in ("weights", "optimizer states", "gradients")) + copies,
        ),
        "inference in mixed precision": (6, step(None, torch.bfloat16).peak_bytes),
    }
    return printed(
        ("bytes a parameter", "published", "predicted"),
        *((name, str(published), f"{nbytes / count:.2f}") for name, (published, nbytes) in rows.items()),
    )


def sizes() -> Rows:
    """What moves the largest batch: published are the number of layers and heads, the architecture and the length, and
    d_model less."""
    axes = {
        "d_model": (32, 64, 128),
        "layers": (2, 4, 8),
        "heads": (4, 8, 16),
        "seq_len": (128, 256, 512),
        "architecture": ("encoder_only_tst", "enc2dec_tst"),
    }
    base = {"d_model": 64, "layers": 4, "heads": 8, "seq_len": 256}
    found = sweep(
        lambda architecture, **sizes: Workload(**workload_parts(architecture, Configuration(**sizes))),
        axes,
        "1 GiB",
        base=base,
        device="cuda",
    )
    print(found)
    lines = ((axis, str(value), str(most)) for axis, results in found.axes.items() for value, most in results.items())
    return [("axis", "value", found.quantity), *lines]


TABLES = {one.__name__: one for one in (batches, attention, bert, rough, parameters, sizes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables and the versions there")
    options = parser.parse_args()
    if unknown := [name for name in options.tables if name not in TABLES]:
        sys.exit(f"memory_tables.py: expected tables of {', '.join(TABLES)}; got {', '.join(unknown)}")
    rows = {}
    for name in options.tables or TABLES:
        table = TABLES[name]
        print(f"\n{' '.join((table.__doc__ or '').split())}\n", flush=True)
        rows[name] = table()
    if options.json is not None:
        versions = {name: version(name) for name in ("torch", "transformers")}
        options.json.write_text(json.dumps({"versions": versions, "tables": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
