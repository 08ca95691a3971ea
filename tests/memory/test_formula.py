"""Closed forms of a transformer's memory: the published numbers, and real encoders tensor by tensor."""

import contextlib
import doctest

import pytest
import torch

from effops.memory import formula
from effops.memory.formula import OPTIMIZERS, Details, estimate_transformer
from effops.memory.models import Attention, Configuration, encoder, layers

LAYERS, HEADS, HEAD_DIM, D_FF, BATCH, LENGTH = 2, 4, 6, 40, 3, 17
WIDTH = HEADS * HEAD_DIM
SEED_BYTES = 8  # of each of effops' attentions with dropout


def estimated(dtype=torch.float32, **details):
    return estimate_transformer(
        LAYERS, HEADS, HEAD_DIM, BATCH, LENGTH, dtype, "detailed", Details(d_ff=D_FF, **details)
    )


def model(details):
    torch.manual_seed(0)
    dropout = 0.2 if details.dropout else 0.0
    built = encoder(Configuration(WIDTH, LAYERS, HEADS, D_FF, LENGTH, dropout, details.attention))
    for module in built.modules():
        if isinstance(module, Attention) and not details.dropout:
            module.dropout.p = 0.0
    return built


def kept_bytes(model, x):
    """Bytes of the storages that autograd saves and modules keep, but for parameters."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(x, None)
    assert result.requires_grad
    for module in model.modules():
        if isinstance(module, Attention) and module.attn is not None:
            pack(module.attn)
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.fixture
def like_cuda(monkeypatch):
    """Dropout and softmax as on CUDA: a mask of bytes, and float32 under autocast."""
    softmax = torch.Tensor.softmax

    def dropout(self, x):
        return torch.native_dropout(x, self.p, self.training)[0] if self.p else x

    def in_float32(x, dim):
        return softmax(x, dim, dtype=torch.float32 if x.dtype == torch.bfloat16 else None)

    monkeypatch.setattr(torch.nn.Dropout, "forward", dropout)
    monkeypatch.setattr(torch.Tensor, "softmax", in_float32)


@pytest.fixture(params=["cpu", "cuda"])
def rules(request):
    if request.param == "cuda":
        request.getfixturevalue("like_cuda")
    return request.param


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("norm", ["composed", "fused"])
@pytest.mark.parametrize("precision", ["float32", "float64", "mixed"])
@pytest.mark.parametrize("attention", ["naive", "fused"])
def test_detailed_activations_are_those_of_a_real_encoder(attention, precision, norm, dropout, rules, monkeypatch):
    if norm == "fused":
        monkeypatch.setattr(layers, "Norm", torch.nn.LayerNorm)
    details = Details(
        d_ff=D_FF,
        attention=attention,
        norm=norm,
        dropout=dropout,
        mixed_precision=precision == "mixed",
        device=rules,
    )
    dtype = torch.bfloat16 if precision == "mixed" else getattr(torch, precision)
    estimate = estimate_transformer(LAYERS, HEADS, HEAD_DIM, BATCH, LENGTH, dtype, "detailed", details)
    wide = torch.float32 if precision == "mixed" else dtype
    built = model(details).to(wide)
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "mixed" else contextlib.nullcontext()
    with autocast:
        kept = kept_bytes(built, torch.rand(BATCH, LENGTH, WIDTH, dtype=wide, requires_grad=True))
    expected = estimate.activation_bytes
    if precision == "mixed":  # the copies of the matrices, which are counted with the weights
        expected += 2 * LAYERS * (4 * WIDTH**2 + 2 * WIDTH * D_FF)
    if attention == "fused" and dropout:
        expected += LAYERS * SEED_BYTES
        if rules == "cuda":  # on a CPU, where it runs, attention keeps none
            expected -= estimate.terms["statistics of attention"]
    assert kept == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", ["sgd", "sgd_momentum", "adam", "adamw", "adafactor"])
def test_detailed_state_is_that_of_a_real_encoder(optimizer, dtype):
    classes = {
        "sgd": torch.optim.SGD,
        "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
    }
    built = model(Details()).to(dtype)
    running = classes[optimizer](built.parameters())
    built(torch.rand(BATCH, LENGTH, WIDTH, dtype=dtype), None).sum().backward()
    running.step()
    states = [value for state in running.state.values() for name, value in state.items() if name != "step"]
    estimate = estimated(dtype, optimizer=optimizer)
    assert estimate.terms["weights"] == sum(parameter.nbytes for parameter in built.parameters())
    assert estimate.terms["gradients"] == sum(parameter.grad.nbytes for parameter in built.parameters())
    assert estimate.terms["optimizer states"] == sum(state.nbytes for state in states if state is not None)


def test_bytes_a_parameter_are_as_published():
    parameters = estimated().terms["weights"] // 4
    for optimizer, published in (("adamw", 8), ("adamw_8bit", 2), ("sgd_momentum", 4), ("sgd", 0)):
        assert estimated(optimizer=optimizer).terms["optimizer states"] == published * parameters
    mixed = estimated(torch.bfloat16, optimizer="adamw", mixed_precision=True)
    vectors = (2 * LAYERS + 1) * 2 * WIDTH  # normalisations, which autocast does not copy
    assert mixed.state_bytes == 18 * parameters - 2 * vectors
    assert mixed.terms["weights as autocast copies them"] == 2 * (parameters - vectors)


def test_rough_formula_is_as_published():
    R, N, D, B, S = 6, 8, 64, 32, 512
    estimate = estimate_transformer(R, N, D, B, S, torch.float64)
    weights, activations = 8 * 4 * R * N**2 * D**2, 8 * R * B * N * S * (S + 2 * D)
    assert estimate.terms["weights"] == weights
    assert estimate.total_bytes == weights + 2 * activations
    assert estimate.readings == {
        "weights + 2 x activations": weights + 2 * activations,
        "weights + activations": weights + activations,
    }
    assert "optimizer" in " ".join(estimate.omissions)
    assert estimate_transformer(R, N, D, B, S).total_bytes == estimate.total_bytes // 2


@pytest.mark.parametrize("name", formula.FORMULAS)
def test_tables_tell_every_term_and_omission(name):
    estimate = estimate_transformer(LAYERS, HEADS, HEAD_DIM, BATCH, LENGTH, formula=name)
    text = str(estimate)
    assert estimate.total_bytes == sum(estimate.terms.values()) == estimate.state_bytes + estimate.activation_bytes
    for term, count in {**estimate.terms, **estimate.readings, "total": estimate.total_bytes}.items():
        assert any(term in line and f"{count:,} B" in line for line in text.splitlines())
    assert all(omission in text for omission in estimate.omissions)


def test_errors_name_the_argument():
    for arguments, message in (
        ({"blocks": 0}, "`blocks` must be at least 1; got 0"),
        ({"dtype": torch.int8}, "`dtype` must be of floating point; got torch.int8"),
        ({"formula": "exact"}, "`formula` must be one of rough, detailed; got 'exact'"),
        ({"details": Details()}, "`details` must be None for the rough formula"),
        ({"formula": "detailed", "details": Details(mixed_precision=True)}, "`dtype` must be torch.bfloat16 or"),
        (
            {"formula": "detailed", "details": Details(mixed_precision=True), "dtype": torch.float8_e5m2},
            "with mixed precision; got torch.float8_e5m2; give one, or Details",  # it was taken for one of 16 bits
        ),
    ):
        sizes = {"blocks": 1, "heads": 1, "head_dim": 1, "batch": 1, "seq_len": 1}
        with pytest.raises(ValueError, match=message):
            estimate_transformer(**{**sizes, **arguments})
    for name in ("attention", "norm", "optimizer", "device"):
        with pytest.raises(ValueError, match=rf"^Details: `{name}` must be one of .*; got 'other'"):
            Details(**{name: "other"})
    with pytest.raises(ValueError, match="`d_ff` must be at least 1"):
        Details(d_ff=0)
    assert set(OPTIMIZERS) >= {"sgd", "adafactor", "adamw_8bit"}


def test_examples():
    found = doctest.testmod(formula, extraglobs={"torch": torch})
    assert found.attempted
    assert not found.failed
