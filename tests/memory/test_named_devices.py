"""Workloads that name devices, on a machine without them: read as the predicted device, or refused with the line.

Autocast of CUDA does nothing on a machine without CUDA. A prediction there once gave float32 under it, without a word.
"""

import re

import pytest
import torch
from torch import nn

from effops.memory import Workload, anatomy, max_batch_size

NARROW = torch.bfloat16


def model():
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))


def batch(size):
    return torch.randn(size, 256)


def loss(model, batch):
    return model(batch).float().sum()


def workload(**parts):
    return Workload(**{"model": model, "batch": batch, "loss": loss, "optimizer": torch.optim.SGD, **parts})


def under(context):
    """A loss whose model is called in a context."""

    def narrow(model, batch):
        with context():
            return model(batch).float().sum()

    return narrow


class Narrowed(nn.Sequential):
    def forward(self, given):
        with torch.autocast("cuda", NARROW):
            return super().forward(given)


class Doubled(torch.autograd.Function):
    """Its backward pass keeps the argument, in the dtype that `custom_fwd` casts it to."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float64)
    def forward(ctx, given):
        assert given.dtype == torch.float64
        assert not torch.is_autocast_enabled("cuda")
        return given.float() * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, upstream):
        return upstream * 2


def decorated(model, batch):
    @torch.autocast("cuda", dtype=NARROW)
    def narrow():
        return model(batch)

    return narrow().float().sum()


AUTOCASTS = {
    "autocast": under(lambda: torch.autocast("cuda", NARROW)),
    "torch.amp": under(lambda: torch.amp.autocast(device_type="cuda", dtype=NARROW)),
    "torch.cuda.amp": under(lambda: torch.cuda.amp.autocast(dtype=NARROW)),
    "decorator": decorated,
}
CONTEXTS = {"mps": lambda: torch.autocast("mps", NARROW), "xpu": lambda: torch.amp.autocast("xpu", NARROW)}


@pytest.mark.parametrize("name", AUTOCASTS)
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_autocast_of_cuda(name):
    """In a prediction for CUDA it is the option's, in one for a CPU it is refused."""
    given = workload(loss=AUTOCASTS[name])
    found = anatomy(given, 512, device="cuda")
    assert found.peak_bytes == anatomy(workload(autocast=NARROW), 512, device="cuda").peak_bytes
    assert found.peak_bytes < anatomy(workload(), 512, device="cuda").peak_bytes
    message = r'predicted with device="cpu" must name no other device; got "cuda" in .*test_named_devices.py, line \d+,'
    with pytest.raises(NotImplementedError, match=message + r' where autocast .*; predict with device="cuda"'):
        anatomy(given, 512)
    with pytest.raises(NotImplementedError, match=message):
        max_batch_size(given, "1 MiB")


def test_autocast_in_a_model():
    given = workload(model=lambda: Narrowed(*model()))
    expected = anatomy(workload(autocast=NARROW), 512, device="cuda").peak_bytes
    assert anatomy(given, 512, device="cuda").peak_bytes == pytest.approx(expected, abs=8)
    with pytest.raises(NotImplementedError, match=r'got "cuda" in .*, line \d+, where autocast'):
        anatomy(given, 512)


def test_the_default_dtype_is_that_of_cuda():
    dtypes = set()

    def seen(model, batch):
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled("cuda")
            dtypes.update({torch.get_autocast_dtype("cuda"), model(batch).dtype})
            with torch.autocast("cuda", enabled=False):
                dtypes.add(model(batch).dtype)
            return model(batch).float().sum()

    anatomy(workload(loss=seen), 8, device="cuda")
    assert dtypes == {torch.float16, torch.float32}
    assert not torch.is_autocast_enabled("cuda")
    assert torch.autocast("cpu").fast_dtype is torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_that_is_off(device):
    given = workload(loss=under(lambda: torch.autocast("cuda", enabled=False)))
    assert anatomy(given, 512, device=device).peak_bytes == anatomy(workload(), 512, device=device).peak_bytes
    narrow = anatomy(workload(autocast=NARROW), 512, device=device).peak_bytes
    found = anatomy(workload(loss=given.loss, autocast=NARROW), 512, device=device).peak_bytes
    assert found == narrow if device == "cpu" else found > narrow  # autocast of a CPU stays on in there


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_autocast_of_other_devices(name, device):
    with pytest.raises(NotImplementedError, match=rf'must name no other device; got "{name}" in .*, line \d+, where'):
        anatomy(workload(loss=under(CONTEXTS[name])), 8, device=device)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_context_that_was_made_before(device):
    """PyTorch has forgotten whether it was to be on."""
    made = torch.autocast("cuda", NARROW)
    with pytest.raises(NotImplementedError, match=r'"cuda" in .*, line \d+, which was made before, .*; write `with'):
        anatomy(workload(loss=under(lambda: made)), 8, device=device)
    with made:  # it stays as it was elsewhere
        pass


def test_functions_with_casts_of_their_own():
    def cast(model, batch):
        with torch.autocast("cuda", NARROW):
            return Doubled.apply(model(batch)).sum()

    anatomy(workload(loss=cast), 8, device="cuda")
    anatomy(workload(loss=lambda model, batch: Doubled.apply(model(batch).double()).sum()), 8, device="cuda")


MOVES = {
    "module.to": {"model": lambda: model().to("cuda")},
    "module.to, dtype": {"model": lambda: model().to(torch.device("cuda", 0), torch.float32)},
    "module.cuda": {"model": lambda: model().cuda()},
    "layer": {"model": lambda: nn.Sequential(nn.Linear(256, 256, device="cuda"), *list(model())[1:])},
    "tensor.to": {"batch": lambda size: batch(size).to("cuda", non_blocking=True)},
    "tensor.to, named": {"batch": lambda size: batch(size).to(device="cuda:0")},
    "tensor.cuda": {"batch": lambda size: batch(size).cuda()},
    "tensor.cuda, index": {"batch": lambda size: batch(size).cuda(0, non_blocking=True)},
    "tensor.to, index": {"batch": lambda size: batch(size).to(0)},  # of "cuda"
    "factory": {"batch": lambda size: torch.randn(size, 256, device="cuda")},
    "factory like": {"batch": lambda size: torch.randn_like(batch(size), device="cuda")},
    "moved in the loss": {"loss": lambda model, batch: loss(model.cuda(), batch.cuda())},
}


@pytest.mark.parametrize("name", MOVES)
def test_tensors_on_cuda(name):
    """They raised `Torch not compiled with CUDA enabled`, or that tensors are on two devices."""
    given = workload(**MOVES[name])
    expected = anatomy(workload(), 512, device="cuda")
    assert anatomy(given, 512, device="cuda").peak_bytes == expected.peak_bytes
    message = r'got "cuda" in .*test_named_devices.py, line (\d+), where a tensor .*; predict with device="cuda", or'
    with pytest.raises(NotImplementedError, match=message) as raised:
        anatomy(given, 512)
    line = int(re.search(message, str(raised.value))[1])
    with open(__file__) as file:
        assert "cuda" in file.read().splitlines()[line - 1]


def test_factories_in_a_device_context():
    def made(size):
        with torch.device("cuda"):
            return torch.randn(size, 256)

    assert anatomy(workload(batch=made), 8, device="cuda").peak_bytes
    with pytest.raises(NotImplementedError, match='must name no other device; got "cuda"'):
        anatomy(workload(batch=made), 8)


def test_pinned_batches():
    """They were an AssertionError of PyTorch's, which has no fake form of them."""
    for made in (lambda size: batch(size).pin_memory(), lambda size: torch.randn(size, 256, pin_memory=True)):
        expected = anatomy(workload(batch=lambda size: torch.randn(size, 256)), 8, device="cuda").peak_bytes
        assert anatomy(workload(batch=made), 8, device="cuda").peak_bytes == expected
        with pytest.raises(NotImplementedError, match=r'; got "cuda" in .*, line \d+, where memory is pinned for it'):
            anatomy(workload(batch=made), 8)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensors_on_other_devices(device):
    for made in (lambda size: batch(size).to("mps"), lambda size: torch.zeros(size, 256, device="xpu")):
        with pytest.raises(
            NotImplementedError, match=r'got "(mps|xpu)" in .*, line \d+, where a tensor .*, name "cuda"'
        ):
            anatomy(workload(batch=made), 8, device=device)


def test_moves_that_checkpoints_repeat():
    class Moving(nn.Linear):
        def forward(self, given):
            with torch.autocast("cuda", NARROW):
                return super().forward(given.cuda())

    given = workload(model=lambda: nn.Sequential(Moving(256, 256), nn.Linear(256, 1)), checkpoint=Moving)
    assert anatomy(given, 8, device="cuda").peak_bytes


USES = {
    "synchronize": lambda: torch.cuda.synchronize(),
    "stream": lambda: torch.cuda.Stream(),
    "generator": lambda: torch.Generator("cuda"),
    "reset": lambda: torch.cuda.reset_peak_memory_stats(),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="it works with CUDA")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_only_a_device_does(use, device):
    """A build of PyTorch with CUDA, but without a driver, raises other errors than one without CUDA."""
    with pytest.raises(Exception) as raised:  # noqa: PT011, as its class differs too
        use()
    said = re.split(r"\n|\. ", str(raised.value))[0]

    def waits(model, batch):
        use()
        return loss(model, batch)

    with pytest.raises(NotImplementedError, match=rf'got "{re.escape(said)}.* in .*py, line \d+; leave that'):
        anatomy(workload(loss=waits), 8, device=device)


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled")
def test_a_scaler_of_gradients_takes_no_more_than_numbers():
    scaler = torch.amp.GradScaler("cuda")
    given = workload(loss=lambda model, batch: scaler.scale(loss(model, batch)))
    expected = anatomy(workload(), 512, device="cuda").peak_bytes
    assert anatomy(given, 512, device="cuda").peak_bytes == pytest.approx(expected, abs=16)
