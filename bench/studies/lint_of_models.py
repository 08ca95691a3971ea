"""What `effops.lint` finds in ten models of transformers and three layers of PyTorch Geometric, and whether it is true.

python bench/studies/lint_of_models.py --json FILE
python bench/studies/lint_of_models.py --json FILE --model T5 --keep    # the others' rows stay as they are

Lint runs at the sizes of training, on fake tensors. Each finding then is mended, and forward runs on real tensors at a
size that fits: without dropout, as it is and mended. A finding is true if loss and gradients agree, and the mended
forward pass takes fewer bytes at most. Lint rewrites no lines of libraries, and all of these are such. So the study has
remedies of its own: attention of effops, logits in chunks, and nodes in parts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from parts.arguments import file_to_write
from parts.report import header, heading, write_json
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import effops
from effops.commands.main import Parser
from effops.measure import Pass, memory
from effops.programs.capture.places import source_line
from effops.programs.large.findings import Finding
from effops.text import format_bytes

CPU = torch.device("cpu")
CLOSE = 1e-4  # of the largest gradient; float32 sums in another order
LINE = "{:<18}{:>12}{:>12}{:>14}{:>12}{:>12}  {}"
TITLES = "model", "now", "after", "measured now", "mended", "saved", "remedy, and the line"
LABELS = 1000
Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Studied:
    """A program: a module, its inputs at the sizes of training and at small ones, and its loss.

    Attributes:
        mended: by the name of a remedy, the loss of the same module with it
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[bool], Inputs]
    loss: Callable[[nn.Module, Inputs], Tensor]
    mended: Mapping[str, Callable[[nn.Module, Inputs], Tensor]] = field(default_factory=dict)
    prepared: Callable[[nn.Module, str], None] = lambda module, remedy: None


@dataclass(frozen=True)
class Row:
    """A finding, and what its remedy saved; or a program without findings, or one that is left out.

    Attributes:
        now_bytes, after_bytes: what lint says at the sizes of training
        why_no_fix: where lint has no code to propose
        remedy: what was run in its place
        measured_bytes, mended_bytes: the most that a forward pass on real tensors allocates, as it is and mended
        error: the largest difference of loss and gradients, as a part of the largest
    """

    model: str
    line: str = ""
    source: str = ""
    expression: str = ""
    now_bytes: int | None = None
    after_bytes: int | None = None
    kept_bytes: int | None = None
    how: str | None = None
    why_no_fix: str = ""
    remedy: str = ""
    measured_bytes: int | None = None
    mended_bytes: int | None = None
    saved_bytes: int | None = None
    error: float | None = None
    is_true: bool | None = None
    note: str = ""
    seconds: float = 0.0


# Remedies of lines in libraries.

ATTENTION, HEAD, NODES = "attention of effops", "logits in chunks", "nodes in parts"


def remedy_of(finding: Finding) -> str:
    """Which remedy a finding asks for: by what makes the large tensor, and what reads it."""
    if "nll_loss" in finding.reducer:
        return HEAD
    return ATTENTION if "bmm" in finding.reducer or "matmul" in finding.reducer else NODES


def with_attention(module: nn.Module, remedy: str) -> None:
    """The attention that lint's runs have, or that of effops."""
    module.set_attn_implementation("effops" if remedy == ATTENTION else "eager")  # type: ignore[operator]


def chunked_head(rows: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    weight: Any = head.weight
    return functional.linear_cross_entropy(rows.flatten(0, -2), weight, targets.flatten(), options=options)


def next_token(body: str, head: str) -> Callable[[nn.Module, Inputs], Tensor]:
    """The loss of a decoder, whose logits are made in chunks."""

    def loss(module: Any, given: Inputs) -> Tensor:
        hidden = getattr(module, body)(input_ids=given["input_ids"]).last_hidden_state
        return chunked_head(hidden[:, :-1], getattr(module, head), given["labels"][:, 1:])

    return loss


def of_t5(module: Any, given: Inputs) -> Tensor:
    hidden = module.encoder(input_ids=given["input_ids"]).last_hidden_state
    shifted = module._shift_right(given["labels"])
    rows = module.decoder(input_ids=shifted, encoder_hidden_states=hidden).last_hidden_state
    scale = module.model_dim**-0.5 if module.config.scale_decoder_outputs else 1.0
    return chunked_head(rows * scale, module.lm_head, given["labels"])


def of_whisper(module: Any, given: Inputs) -> Tensor:
    start = torch.full_like(given["labels"][:, :1], module.config.decoder_start_token_id)
    shifted = torch.cat([start, given["labels"][:, :-1]], 1)
    rows = module.model(input_features=given["input_features"], decoder_input_ids=shifted).last_hidden_state
    return chunked_head(rows, module.proj_out, given["labels"])


def in_parts(module: Any, given: Inputs) -> Tensor:
    """The layer on the edges of some nodes at a time, made again in backward."""
    x, edges = given["x"], given["edge_index"]
    parts = []
    for rows in torch.arange(len(x)).chunk(16):
        own = edges[:, (edges[1] >= rows[0]) & (edges[1] <= rows[-1])]
        own = torch.stack([own[0], own[1] - rows[0]])

        def of_part(x: Tensor, own: Tensor = own, rows: Tensor = rows) -> Tensor:
            return module((x, x[rows]), own)  # type: ignore[no-any-return]

        parts.append(checkpoint(of_part, x, use_reentrant=False))
    return torch.cat(parts).square().mean()


# Programs.


def loss_of(module: nn.Module, given: Inputs) -> Tensor:
    return module(**given).loss  # type: ignore[no-any-return]


def mean_of(module: nn.Module, given: Inputs) -> Tensor:
    return module(**given).last_hidden_state.square().mean()  # type: ignore[no-any-return]


def numbers(*shape: int) -> Tensor:
    return torch.randint(1, LABELS, shape)


def tokens(batch: int, length: int, *, labels: bool) -> Callable[[bool], Inputs]:
    def inputs(small: bool) -> Inputs:
        ids = numbers(1 if labels else 2, 512) if small else numbers(batch, length)
        return {"input_ids": ids, "labels": ids} if labels else {"input_ids": ids}

    return inputs


def images(small: bool) -> Inputs:
    return {"pixel_values": torch.randn(2 if small else 32, 3, 224, 224)}


def model(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A model of random weights."""

    def make() -> nn.Module:
        cls: Any = getattr(transformers, kind)
        config = cls.config_class(**sizes)
        return cls._from_config(config, attn_implementation="eager")  # type: ignore[no-any-return]

    return make


def pairs_of_texts(small: bool) -> Inputs:
    count = 2 if small else 16
    return {"input_ids": numbers(count, 512), "labels": numbers(count, 512)}


def speech(small: bool) -> Inputs:
    count = 1 if small else 8
    return {"input_features": torch.randn(count, 80, 3000), "labels": numbers(count, 448)}


def decoder(name: str, kind: str, batch: int, length: int, body: str, head: str, **sizes: Any) -> Studied:
    mended = {HEAD: next_token(body, head), ATTENTION: loss_of}
    return Studied(name, model(kind, **sizes), tokens(batch, length, labels=True), loss_of, mended, with_attention)


def encoder(name: str, kind: str, inputs: Callable[[bool], Inputs], **sizes: Any) -> Studied:
    return Studied(name, model(kind, **sizes), inputs, mean_of, {ATTENTION: mean_of}, with_attention)


def layer(name: str, kind: str, *arguments: Any, **options: Any) -> Studied:
    """A layer of PyTorch Geometric on a graph of 10,000 nodes and 400,000 edges."""

    def make() -> nn.Module:
        import torch_geometric.nn

        return getattr(torch_geometric.nn, kind)(*arguments, **options)  # type: ignore[no-any-return]

    def inputs(small: bool) -> Inputs:
        nodes, edges = (1000, 40_000) if small else (10_000, 400_000)
        return {"x": torch.randn(nodes, 128), "edge_index": torch.randint(nodes, (2, edges))}

    def loss(module: nn.Module, given: Inputs) -> Tensor:
        return module(given["x"], given["edge_index"]).square().mean()  # type: ignore[no-any-return]

    return Studied(name, make, inputs, loss, {NODES: in_parts})


LLAMA = {"num_hidden_layers": 1, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
OPT = {"hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 1024, "num_attention_heads": 4}
MODELS = (
    encoder("BERT", "BertModel", tokens(32, 512, labels=False), num_hidden_layers=1),
    encoder("DistilBERT", "DistilBertModel", tokens(32, 512, labels=False), n_layers=1),
    encoder("ViT", "ViTModel", images, num_hidden_layers=1),
    encoder("DINOv2", "Dinov2Model", images, num_hidden_layers=1),
    decoder("GPT-2", "GPT2LMHeadModel", 8, 1024, "transformer", "lm_head", n_layer=1, n_embd=256, n_head=4),
    decoder("OPT", "OPTForCausalLM", 8, 1024, "model", "lm_head", num_hidden_layers=1, **OPT),
    decoder("Llama", "LlamaForCausalLM", 4, 2048, "model", "lm_head", **LLAMA),
    decoder("Qwen2", "Qwen2ForCausalLM", 4, 2048, "model", "lm_head", num_key_value_heads=2, **LLAMA),
    Studied(
        "T5",
        model("T5ForConditionalGeneration", num_layers=1, num_decoder_layers=1, decoder_start_token_id=0),
        pairs_of_texts,
        loss_of,
        {HEAD: of_t5, ATTENTION: loss_of},
        with_attention,
    ),
    Studied(
        "Whisper",
        model("WhisperForConditionalGeneration", encoder_layers=1, decoder_layers=1),
        speech,
        loss_of,
        {HEAD: of_whisper, ATTENTION: loss_of},
        with_attention,
    ),
)
LAYERS = (
    layer("GATv2Conv", "GATv2Conv", 128, 16, heads=8, add_self_loops=False),
    layer("TransformerConv", "TransformerConv", 128, 16, heads=8),
    layer("SAGEConv", "SAGEConv", 128, 128),
)


# Lint, and the truth of what it says.


def rows_of(studied: Studied) -> Iterator[Row]:
    began = time.perf_counter()

    def trained() -> Tensor:
        return studied.loss(studied.make(), studied.inputs(False))

    try:
        findings = effops.lint(trained).findings
    except Exception as error:  # one program that lint cannot follow does not end the table
        yield Row(studied.name, note=f"lint raised {type(error).__name__}: {' '.join(str(error).split())}"[:300])
        return
    seconds = round(time.perf_counter() - began, 1)
    if not findings:
        yield Row(studied.name, note="no finding", seconds=seconds)
    for one in findings:
        yield row_of(studied, one, seconds)


def row_of(studied: Studied, finding: Finding, seconds: float) -> Row:
    place = finding.library or finding.place
    assert place is not None
    file = place.file.rpartition("site-packages/")[2]
    if file.startswith("/"):
        file = "/".join(file.split("/")[-4:])
    said = {
        "model": studied.name,
        "line": f"{file}:{place.line}",
        "source": source_line(place),
        "expression": f"{finding.expression}, which {finding.reducer} reads",
        "now_bytes": finding.now_bytes,
        "after_bytes": finding.after_bytes,
        "kept_bytes": finding.kept_bytes,
        "how": finding.fix and finding.fix.how,
        "seconds": seconds,
    }
    if finding.fix is None:
        said["why_no_fix"] = f"lint rewrites no line of {file.partition('/')[0]}"
    remedy = remedy_of(finding)
    if remedy not in studied.mended:
        return Row(**said, note="the study has no remedy for it")
    return Row(**said, remedy=remedy, **checked(studied, remedy))


def checked(studied: Studied, remedy: str) -> dict[str, Any]:
    """Loss, gradients and bytes of a forward pass at small sizes, as it is and mended."""
    torch.manual_seed(0)
    module, given = studied.make().eval(), studied.inputs(True)
    found = []
    for name, loss in (("", studied.loss), (remedy, studied.mended[remedy])):
        studied.prepared(module, name)
        nbytes = memory(Pass(lambda loss=loss: loss(module, given), ())).peak_bytes
        value = loss(module, given)
        wanted = [one for one in module.parameters() if one.requires_grad]
        found.append((nbytes, [value.detach(), *torch.autograd.grad(value, wanted, allow_unused=True)]))
    (before, own), (after, mended) = found
    error = max(difference(own[:1], mended[:1]), difference(own[1:], mended[1:]))
    return {
        "measured_bytes": before,
        "mended_bytes": after,
        "saved_bytes": before - after,
        "error": error,
        "is_true": error <= CLOSE and after < before,
    }


def difference(own: Sequence[Tensor | None], mended: Sequence[Tensor | None]) -> float:
    """The largest difference, as a part of the largest number of all."""
    if any((one is None) != (other is None) for one, other in zip(own, mended)):
        return math.inf
    pairs = [(one, other) for one, other in zip(own, mended) if one is not None and other is not None]
    scale = max(float(one.abs().max()) for one, _ in pairs)
    return max(float((one - other).abs().max()) for one, other in pairs) / scale


def kept_from(file: Path, chosen: Sequence[str]) -> tuple[dict[str, Any], list[Row]]:
    """The rows that an earlier run has of other programs, and what to say of them in the header."""
    content = json.loads(file.read_text())
    rows = [Row(**one) for one in content["rows"] if one["model"] not in chosen]
    told = {key: content["header"][key] for key in ("commit", "date")}
    earlier = [*content["header"].get("kept", []), {**told, "models": list(dict.fromkeys(one.model for one in rows))}]
    return {"kept": earlier}, rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each finding; returns the exit code: 1 if one is not true, or a program cannot be followed."""
    parser: argparse.ArgumentParser = Parser(prog="lint_of_models.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", metavar="NAME", help="one program, or several; default: all")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write header and rows there")
    parser.add_argument("--keep", action="store_true", help="with --model: keep the rows of other programs in FILE")
    options = parser.parse_args(arguments)
    if options.keep and not (options.model and options.json and options.json.exists()):
        parser.error("--keep: it needs --model, and --json with a file that there is; give both, or leave it out")
    transformers.logging.set_verbosity_error()
    effops.register_transformers()
    programs = list(MODELS)
    if find_spec("torch_geometric"):
        programs += LAYERS
    else:
        print(f"{', '.join(one.name for one in LAYERS)}: skipped; `pip install torch_geometric` brings them")
    head = {**header(CPU, None), "transformers": transformers.__version__}
    print(f"{heading(head, 120)}\n{LINE.format(*TITLES)}", flush=True)
    rows: list[Row] = []
    told, kept = kept_from(options.json, options.model) if options.keep else ({}, [])
    order = [one.name for one in (*MODELS, *LAYERS)]
    for studied in programs:
        if options.model and studied.name not in options.model:
            continue
        for row in rows_of(studied):
            rows.append(row)
            print_row(row)
            if options.json:
                write_json(
                    options.json, {**head, **told}, sorted([*rows, *kept], key=lambda one: order.index(one.model))
                )
    failed = [one.model for one in rows if one.is_true is False or one.note.startswith(("lint raised", "the study"))]
    print(f"{sum(one.is_true is True for one in rows)} findings are true; not true or not known: {failed or 'none'}")
    return int(bool(failed))


def print_row(row: Row) -> None:
    if row.now_bytes is None:
        print(f"{row.model:<18}{row.note}", flush=True)
        return
    sizes = row.now_bytes, row.after_bytes, row.measured_bytes, row.mended_bytes, row.saved_bytes
    texts = ("-" if one is None else format_bytes(one) for one in sizes)
    verdict = row.note or f"{row.remedy}{'' if row.is_true else ': NOT TRUE'}"
    print(LINE.format(row.model, *texts, f"{verdict}; {row.line}"), flush=True)
    error = "" if row.error is None else f"; error {row.error:.1e}"
    print(f"    {row.expression}\n    {row.how or row.why_no_fix}{error}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
