"""The storages that kernels create on fake tensors: those of the interpreted call, in the same order."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")
from effops.kernels import pairs, power_spherical

from .kernels_workspaces import (
    CALLS,
    DTYPES,
    SCORES,
    allocated,
    allocated_on_fake_tensors,
    mixture_forward,
)
from .support import triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for the infinities of tails


@pytest.fixture
def interpreted():
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")


@pytest.mark.interpreted
@pytest.mark.each_value
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_on_fake_tensors_allocates_what_the_call_does(call, dtype):
    assert allocated_on_fake_tensors(call, dtype) == allocated(call, dtype)


@pytest.mark.usefixtures("interpreted")
def test_statistics_of_a_mixture_in_parts_are_a_workspace():
    statistics, workspace, *_ = allocated_on_fake_tensors(mixture_forward, torch.float32)[4:]
    assert workspace == 3 * statistics  # 70 components in tiles of 32


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.usefixtures("interpreted")
def test_calls_on_fake_tensors_need_no_interpreter():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("kernels_workspaces.py"))
    output = subprocess.run([sys.executable, script], env=environment, check=True, capture_output=True, text=True)
    assert json.loads(output.stdout) == [[allocated_on_fake_tensors(call, dtype) for dtype in DTYPES] for call in CALLS]


def test_a_fake_device_needs_no_driver():
    with FakeTensorMode():
        x, loc, out = (torch.empty(2, *sizes, device="cuda") for sizes in ((33, 17), (40, 17), (33, 40)))
        scale = torch.empty(2, 1, 40, device="cuda").expand_as(out)
        pairs.forward(power_spherical.MAP, x, loc, scale, out, **SCORES)
