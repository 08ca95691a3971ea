"""Values that follow from numbers are known to a prediction, and others are not."""

import pytest
import torch
from torch import nn

from effops.memory import Workload, anatomy
from effops.prediction.known_values import MOST_FLOATS, MOST_INTEGERS, KnownValues
from effops.pytorch import FakeTensorMode

LENGTH = 37


def asked(of):
    """A workload that takes 40,000 bytes if the value is true, and 80,000 if it is not."""

    def generate(model, batch):
        return torch.empty(10000 if of(batch) else 20000)

    return Workload(nn.Identity, lambda size: torch.randn(size, LENGTH), generate=generate)


@pytest.mark.parametrize(
    "value",
    [
        lambda x: torch.ones_like(x[:, 0], dtype=torch.bool).all(),
        lambda x: (torch.arange(LENGTH).diff() == 1).all(),
        lambda x: torch.ones(len(x), LENGTH, dtype=torch.long).sum() == len(x) * LENGTH,
        lambda x: x.new_zeros(5).add_(1).mul_(3)[2:].eq(3).all(),
        lambda x: torch.equal(torch.arange(3), torch.tensor([0, 1, 2])),
        lambda x: torch.full((2,), 7)[1].item() == 7,
        lambda x: not (torch.arange(LENGTH)[None] < torch.tensor([[LENGTH], [5]])).all(),
    ],
)
def test_values_of_numbers_are_known(value):
    """The branch is taken that the step takes."""
    taken, other = (
        {one.nbytes for one in anatomy(asked(of), 3).timeline.allocations} for of in (value, lambda x: not value(x))
    )
    assert 40000 in taken - other
    assert 80000 in other - taken


@pytest.mark.parametrize(
    "value",
    [
        lambda x: x.sum() > 0,
        lambda x: torch.ones(5).add_(x[0, :5]).sum() > 0,
        lambda x: torch.ones(MOST_FLOATS + 1).all(),
        lambda x: torch.ones(MOST_INTEGERS + 1, dtype=torch.long).all(),
        lambda x: torch.ones(5).uniform_().sum() > 0,
        lambda x: torch.ones_like(x).normal_().sum() > 0,
    ],
)
def test_other_values_are_not(value):
    with pytest.raises(NotImplementedError, match="must not depend on the values of tensors"):
        anatomy(asked(value), 3)


def test_a_view_of_what_has_changed_is_known():
    with FakeTensorMode(), KnownValues() as values:
        base = torch.zeros(4)
        part = base[1:3]
        base.add_(2)
        assert part.sum().item() == 4
        base[0] = torch.randn(())
        assert not values.knows(base)
        assert not values.knows(part)


def llama(heads, mask):
    """A model of transformers without weights of its own, its mask made by `mask` from the shape of a batch."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 101}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=heads)

    def batch(size):
        ids = torch.randint(0, 101, (size, 160))
        return {"input_ids": ids, "labels": ids, **mask(size, 160)}

    return Workload(
        lambda: transformers.LlamaForCausalLM(config),
        batch,
        lambda model, batch: model(**batch).loss,
        torch.optim.SGD,
    )


@pytest.mark.parametrize(
    "mask",
    [
        lambda size, length: {},
        lambda size, length: {"attention_mask": torch.ones(size, length, dtype=torch.long)},
        lambda size, length: {"attention_mask": (torch.arange(length) < length - torch.arange(size)[:, None]).long()},
    ],
    ids=["no mask", "ones", "padded"],
)
@pytest.mark.parametrize("heads", [8, 2])
def test_masks_of_transformers(heads, mask):
    """It leaves out a mask that hides nothing, and repeats grouped heads where there is one."""
    found = anatomy(llama(heads, mask), 3, measure=True)
    assert found.unknown == ()
    assert abs(found.peak_bytes / found.measured.peak_bytes - 1) < 0.005, found


def test_padding_takes_memory():
    peaks = [
        anatomy(llama(2, mask), 3).peak_bytes
        for mask in (
            lambda size, length: {"attention_mask": torch.ones(size, length)},
            lambda size, length: {"attention_mask": torch.ones(size, length).tril()},
        )
    ]
    assert peaks[0] < peaks[1]
