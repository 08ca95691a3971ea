"""Values that follow from numbers are known to a prediction, and others are not."""

import pytest
import torch
from torch import nn

from effops.memory import Workload, anatomy
from effops.prediction.known_values import MOST_FLOATS, MOST_INTEGERS, KnownValues
from effops.pytorch.prediction import FakeTensorMode

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


@pytest.mark.parametrize(
    "log_prob",
    [
        lambda x: torch.distributions.Normal(x, x.exp()).log_prob(x.detach()),
        lambda x: torch.distributions.Categorical(logits=x).log_prob(torch.zeros(len(x))),
        lambda x: torch.distributions.Independent(torch.distributions.Bernoulli(logits=x), 1).log_prob(x.detach() * 0),
    ],
    ids=["normal", "categorical", "bernoulli"],
)
def test_checks_of_distributions_hold(log_prob):
    workload = Workload(
        lambda: nn.Linear(LENGTH, 64),
        lambda size: torch.randn(size, LENGTH),
        lambda model, x: -log_prob(model(x)).mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    found = anatomy(workload, 500, measure=True)
    assert not found.unknown
    assert abs(found.peak_bytes - found.measured.peak_bytes) <= 64


def test_a_view_of_what_has_changed_is_known():
    with FakeTensorMode(), KnownValues() as values:
        base = torch.zeros(4)
        part = base[1:3]
        base.add_(2)
        assert part.sum().item() == 4
        base[0] = torch.randn(())
        assert not values.knows(base)
        assert not values.knows(part)


def test_what_exists_already_is_left_alone():
    """The values of real tensors are read from copies: views of them once changed the caller's."""
    counts, data = torch.zeros(4), torch.ones(9, 5)
    array = data.numpy()

    def batch(size):
        return torch.from_numpy(array)[:size].sub_(0.5)

    def generate(model, x):
        counts[0] += 1
        return x * counts[0]

    anatomy(Workload(nn.Identity, batch, generate=generate), 3)
    assert torch.equal(counts, torch.zeros(4))
    assert torch.equal(data, torch.ones(9, 5))


@pytest.mark.parametrize("change", [lambda real: real.fill_(7), lambda real: real.view(2, 2).fill_(7)])
@pytest.mark.parametrize("ask", [lambda real, view: view, lambda real, view: real])
def test_real_tensors_that_a_step_would_change_are_unknown(change, ask):
    real = torch.zeros(4)

    def value(x):
        view = real.view(2, 2)
        change(real)
        return ask(real, view).sum() > 0

    with pytest.raises(NotImplementedError, match="must not depend on the values of tensors"):
        anatomy(asked(value), 3)
    assert torch.equal(real, torch.zeros(4))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, lambda width: nn.InstanceNorm1d(width, track_running_stats=True)])
def test_running_statistics_are_unknown(layer):
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.weight = layer(16), nn.Parameter(torch.ones(1))

        def forward(self, x):
            self.norm(x)
            return self.weight * (x if self.norm.running_mean.abs().sum() > 0 else x.exp())

    workload = Workload(Asking, lambda size: torch.randn(size, 16, 5), lambda m, x: m(x).sum(), torch.optim.SGD)
    with pytest.raises(NotImplementedError, match="must not depend on the values of tensors"):
        anatomy(workload, 3)


@pytest.mark.parametrize(
    "place",
    [
        lambda a: a.t_(),
        lambda a: a.set_(torch.full((2, 3), 9)),
        lambda a: a.resize_(3, 2),
        lambda a: a.unsqueeze_(0),
    ],
)
def test_what_gets_another_place_is_unknown_to_all_that_share_it(place):
    def value(x):
        first = torch.arange(6).view(2, 3)
        second = first.detach()
        place(first)
        return second[1].sum() == 12

    with pytest.raises(NotImplementedError, match="must not depend on the values of tensors"):
        anatomy(asked(value), 3)


def test_operators_of_others_do_not_run():
    ran = []
    library = torch.library.Library("of_others", "FRAGMENT")
    library.define("noted(Tensor x) -> Tensor")
    library.impl("noted", lambda x: ran.append(x) or x + 1, "CPU")
    library.impl("noted", torch.empty_like, "Meta")
    workload = Workload(
        nn.Identity, torch.zeros, generate=lambda model, x: torch.ops.of_others.noted(torch.arange(4.0))
    )
    try:
        assert anatomy(workload, 3).unknown == ("of_others::noted",)
    finally:
        library._destroy()
    assert ran == []


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
