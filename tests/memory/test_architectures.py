"""The published models: their parameters, their attention, and training with and without storage."""

import dataclasses
import doctest
import math
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from effops.blocks.log_sparse import Pattern
from effops.memory.models import (
    ARCHITECTURES,
    KINDS,
    TST,
    Attention,
    Configuration,
    EncoderOnlyTST,
    Norm,
    Positions,
    bert_large,
    time_series,
    workload_parts,
)

SMALL = Configuration(d_model=16, layers=1, heads=2, d_ff=24, seq_len=12)


def train(parts, batch_size):
    """The model and its optimizer after a step."""
    model = parts["model"]()
    optimizer = parts["optimizer"](model.parameters())
    parts["loss"](model, parts["batch"](batch_size)).backward()
    optimizer.step()
    return model, optimizer


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("architecture", "count"), [("tst", 670_338), ("encoder_only_tst", 268_097), ("enc2dec_tst", 670_338)]
)
@pytest.mark.parametrize("attention", KINDS)
def test_parameters_are_as_many_as_published(architecture, count, attention):
    parts = workload_parts(architecture, Configuration(attention=attention))
    with torch.device("meta"):
        assert parameters(parts["model"]()) == count


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trains(architecture, attention, fake):
    parts = workload_parts(architecture, dataclasses.replace(SMALL, attention=attention))
    if fake:
        with FakeTensorMode():
            model, optimizer = train(parts, batch_size=3)
    else:
        model, optimizer = train(parts, batch_size=3)
    unused = {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.grad is None}
    assert (
        unused
        == {
            "tst": {"generator"},
            "encoder_only_tst": set(),
            "enc2dec_tst": {"generator", "tgt_embedding"},
        }[architecture]
    )
    assert all((parameter in optimizer.state) == (parameter.grad is not None) for parameter in model.parameters())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_results_do_not_depend_on_how_attention_is_computed(architecture):
    torch.manual_seed(0)
    naive, fused = (
        ARCHITECTURES[architecture](dataclasses.replace(SMALL, attention=attention)).double().eval()
        for attention in ("naive", "fused")
    )
    fused.load_state_dict(naive.state_dict())
    sequences = 1 if architecture == "encoder_only_tst" else 2
    inputs = [torch.rand(3, 12, 1, dtype=torch.float64) for _ in range(sequences)]
    for mask in (None, torch.ones(3, 1, 12), torch.ones(12, 12).tril().expand(3, 12, 12)):
        masks = [mask] * sequences
        torch.testing.assert_close(naive(*inputs, *masks), fused(*inputs, *masks))


def test_sequences_may_differ_in_length():
    for attention in KINDS:
        model = TST(dataclasses.replace(SMALL, attention=attention))
        assert model(torch.rand(3, 12, 1), torch.rand(3, 7, 1)).shape == (3, 7, 1)


def test_log_sparse_attention_is_naive_attention_under_its_pattern():
    torch.manual_seed(0)
    naive, sparse = (
        EncoderOnlyTST(dataclasses.replace(SMALL, attention=attention)).double().eval()
        for attention in ("naive", "log_sparse")
    )
    sparse.load_state_dict(naive.state_dict())
    src = torch.rand(3, 12, 1, dtype=torch.float64)
    offsets = torch.arange(12).unsqueeze(-1) - torch.arange(12)
    mask = (offsets.unsqueeze(-1) == torch.tensor([0, 1, 2, 4, 8])).any(-1)
    assert int(mask.sum()) == Pattern(1, None).pairs(12)
    torch.testing.assert_close(sparse(src), naive(src, mask))


@pytest.mark.parametrize("attention", KINDS)
def test_attention_is_dropped_in_training_alone(attention):
    torch.manual_seed(0)
    layer = Attention(16, 2, attention)
    layer.dropout.p = 0.5
    x = torch.rand(3, 12, 16)
    assert not torch.equal(layer(x, x, x, None), layer(x, x, x, None))
    layer.eval()
    assert torch.equal(layer(x, x, x, None), layer(x, x, x, None))


def test_naive_attention_keeps_its_weights_after_dropout():
    layer = Attention(16, 2, "naive")
    x = torch.rand(3, 12, 16)
    layer(x, x, x, None)
    assert layer.attn.shape == (3, 2, 12, 12)
    assert (layer.attn == 0).any()
    layer.eval()(x, x, x, None)
    torch.testing.assert_close(layer.attn.sum(-1), torch.ones(3, 2, 12))


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation gives, forward and backward."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fused_and_log_sparse_attention_never_hold_all_pairs(architecture):
    configuration = dataclasses.replace(SMALL, seq_len=128)
    all_pairs = 3 * configuration.heads * configuration.seq_len**2
    for attention in KINDS:
        parts = workload_parts(architecture, dataclasses.replace(configuration, attention=attention))
        with FakeTensorMode():
            model, batch = parts["model"](), parts["batch"](3)
            with Largest() as largest:
                parts["loss"](model, batch).backward()
        if attention == "naive":
            assert largest.numel == all_pairs
        else:
            assert largest.numel <= max(3 * 128 * 24, parameters(model))


def test_norm_and_positions_are_those_of_the_annotated_transformer():
    torch.manual_seed(0)
    norm = Norm(4).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    variance = (x - x.mean(-1, keepdim=True)).square().sum(-1, keepdim=True) / 3
    torch.testing.assert_close(norm(x), (x - x.mean(-1, keepdim=True)) / (variance.sqrt() + 1e-6))
    table = Positions(SMALL).table
    assert table.shape == (5000, 16)
    for position, feature in ((0, 0), (7, 0), (7, 1), (11, 6), (11, 7)):
        angle = position / 10000 ** (2 * (feature // 2) / 16)
        expected = math.cos(angle) if feature % 2 else math.sin(angle)
        assert table[position, feature].item() == pytest.approx(expected, abs=1e-6)
    assert Positions(dataclasses.replace(SMALL, seq_len=6000)).table.shape == (6000, 16)


def test_errors_name_the_argument():
    for name, value in (("heads", 3), ("layers", 0), ("dropout", 1.0), ("attention", "sparse")):
        with pytest.raises(ValueError, match=rf"^Configuration: .*{name}.*got"):
            dataclasses.replace(SMALL, **{name: value})
    with pytest.raises(
        ValueError, match="`architecture` must be one of tst, encoder_only_tst, enc2dec_tst; got 'bert'"
    ):
        workload_parts("bert")
    model = EncoderOnlyTST(dataclasses.replace(SMALL, attention="log_sparse"))
    with pytest.raises(ValueError, match="`mask` must be None"):
        model(torch.rand(3, 12, 1), torch.ones(3, 1, 12))


def test_bert_large_is_as_large_as_published():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        assert parameters(bert_large()["model"]()) == 335_143_938


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bert_trains_without_storage(attention, checkpointing):
    pytest.importorskip("transformers")
    parts = bert_large(layers=1, seq_len=64, attention=attention, checkpointing=checkpointing)
    with FakeTensorMode():
        model, _ = train(parts, batch_size=3)
    assert model.training
    assert model.config._attn_implementation == attention
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_bert_saves_less_when_checkpointing():
    pytest.importorskip("transformers")
    saved = {}
    for checkpointing in (False, True):
        parts = bert_large(layers=2, seq_len=64, checkpointing=checkpointing)
        found = saved[checkpointing] = set()

        def pack(tensor, found=found):
            found.add((tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()))
            return tensor

        with FakeTensorMode():
            model = parts["model"]()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = parts["loss"](model, parts["batch"](3))
        known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        saved[checkpointing] = sum(nbytes for start, nbytes in found if start not in known)
        del loss
    assert saved[True] < saved[False] / 5


def test_bert_tells_what_is_wrong(monkeypatch):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"`seq_len` must be at most 512; got 513"):
        bert_large(seq_len=513)
    with pytest.raises(ValueError, match="`attention` must be one of eager, sdpa; got 'fused'"):
        bert_large(attention="fused")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install .*"\.\[bert\]"'):
        bert_large()


def test_examples():
    found = doctest.testmod(time_series, extraglobs={"torch": torch})
    assert found.attempted == 4  # lines of the examples of TST and of workload_parts
    assert not found.failed
