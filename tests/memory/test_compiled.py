"""What torch.compile compiles is refused: it was once predicted as if it were not compiled, without a mark."""

import threading

import pytest
import torch
from torch import nn

from effops.memory import Workload, anatomy, max_batch_size


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 7)

    def forward(self, x):
        return self.first(x).sin().cos().sum()


class Compiled:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


def whole(backend):
    return torch.compile(Chain(), backend=backend)


def in_place(backend):
    model = Chain()
    model.compile(backend=backend, fullgraph=True, dynamic=True)
    return model


def a_part(backend):
    chain = Chain()
    chain.forward = torch.compile(chain.forward, backend=backend)
    return nn.Sequential(nn.Linear(7, 7), chain)


def workload(build):
    def loss(model, x):
        return model(x).sum()

    return Workload(build, lambda size: torch.randn(size, 7), loss, torch.optim.SGD)


@pytest.fixture
def backend():
    torch._dynamo.reset()
    yield Compiled()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize(
    ("build", "module"), [(whole, "_orig_mod"), (in_place, "model"), (a_part, "1")], ids=["whole", "in place", "a part"]
)
def test_compiled_models_are_refused_and_compiled_afterwards(build, module, backend):
    """A prediction once kept the class from being compiled, until `torch._dynamo.reset()`."""
    compiled = workload(lambda: build(backend))
    message = rf"anatomy: module `{module}` \(\w+\) must not be compiled, .* of `forward` in .*test_compiled"
    for measure in (False, True):
        with pytest.raises(NotImplementedError, match=message):
            anatomy(compiled, 5, measure=measure)
    with pytest.raises(NotImplementedError, match=message):
        max_batch_size(compiled, "1 MB")
    assert backend.count == 0
    build(backend)(torch.randn(5, 7))
    assert backend.count == 1
    with pytest.raises(NotImplementedError, match=message):
        anatomy(compiled, 5)


def test_compiled_losses_are_refused(backend):
    mean = torch.compile(lambda x: x.sin().mean(), backend=backend)
    compiled = Workload(
        lambda: nn.Linear(7, 5), lambda size: torch.randn(size, 7), lambda m, x: mean(m(x)), torch.optim.SGD
    )
    with pytest.raises(NotImplementedError, match="anatomy: the workload must not be compiled"):
        anatomy(compiled, 5)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_the_remedy_is_one(backend):
    expected = anatomy(workload(Chain), 5).peak_bytes
    with torch.compiler.set_stance("force_eager"):
        assert anatomy(workload(lambda: whole(backend)), 5).peak_bytes == expected
    assert max_batch_size(workload(lambda: in_place(backend)), "1 MB", mode="probe").batch_size > 0
    assert backend.count > 0


def test_other_threads_compile(backend):
    doubled = torch.compile(lambda x: x + x, backend=backend)

    def batch(size):
        thread = threading.Thread(target=doubled, args=(torch.ones(3),))
        thread.start()
        thread.join()
        return torch.randn(size, 7)

    assert anatomy(Workload(Chain, batch), 5).peak_bytes > 0
    assert backend.count > 0
