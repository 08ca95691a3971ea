"""The C++ library under sanitizers of memory and of threads, and where a process is interrupted or ends."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from effops.kernels import library

needs_library = pytest.mark.skipif(library.obstacle() != "", reason=library.obstacle())
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
FLAGS = ["-O1", "-g", "-std=c++17", "-mavx2", "-mfma"]
SECONDS = 300  # for a process that computes; one that hangs is ended

CALLS = """
import sys
from pathlib import Path
import torch
import effops
from effops.kernels import library
if sys.argv[1:]:
    torch.backends.cpu.get_cpu_capability = lambda: "AVX2"
    library.FOLDER = Path(sys.argv[1])
    torch.set_default_dtype(getattr(torch, sys.argv[2]))
    library.REALS = {torch.get_default_dtype(): library.REALS[torch.get_default_dtype()]}
torch.set_num_threads(3)


def call(name, *args, **options):
    leaves = [one.clone().requires_grad_() for one in args]
    getattr(effops, name)(*leaves, variant="cpp", **options).sum().backward()


def calls(T, M, N, D):
    loc, x = torch.randn(T, M, D), torch.randn(N, T, 1, D)
    scale, deviations, log_weights = torch.rand(T, M) + 1, torch.rand(T, M, D) + 1, torch.zeros(M)
    directions = [torch.nn.functional.normalize(one, dim=-1) for one in (loc, x)]
    call("von_mises_fisher_mixture_log_prob", log_weights, directions[0], scale, directions[1])
    call("von_mises_fisher_mixture_log_prob", log_weights, directions[0], torch.rand(N, T, 1), directions[1])
    call("normal_mixture_log_prob", log_weights, loc, deviations, x)
    call("normal_mixture_log_prob", log_weights.expand(N, T, M), loc, deviations[..., :1], x)
    if M >= 8:
        call("power_spherical_log_prob", directions[0], scale, directions[1])
        call("power_spherical_log_prob", directions[0], torch.rand(N, T, M), directions[1])
        call("normal_log_prob", loc, deviations, x)
        call("broadcast_dot", x, loc)
    attend(T, M, N, D)


def attend(T, M, N, D):
    # Also with keys that are shared, masks of rows that are not whole, and values of another length than keys.
    query, key, value = torch.randn(2, T, M, D), torch.randn(T, N, D), torch.randn(T, N, D + 3)
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.rand(M, N) > 0.5}, {"attn_mask": torch.randn(N)}):
        call("attention", query, key, value, **options)
        call("attention_weights", query, key, **options)
        call("attention_scores", query, key, **options)
        call("attention", query, key, value, dropout_p=0.2, **options)
    call("attention_weights", 1e4 * query, 1e3 * key)  # scores so far apart that their exponents are no integers
    sequence = torch.randn(2, T, M, D), torch.randn(T, M, D), torch.randn(T, M, D + 3)
    call("log_sparse_attention", *sequence)
    call("log_sparse_attention", *sequence, local=140, restart=150)
    for mask in (torch.randn(M, N), torch.randn(2, 1, M, N), torch.randn(N), torch.randn(T, M, 1)):
        call("attention", query, key, value, mask)
        call("attention_scores", query, key, mask)
        for spread in (1, 20, 100):
            call("additive_attention", spread * query, key, value, torch.randn(D), mask)
            call("additive_attention_scores", spread * query, key, torch.randn(T, 1, 1, D))
"""
ALL_SIZES = """
for sizes in ((20, 9, 70, 5), (2, 300, 150, 33), (3, 17, 140, 200), (1, 1, 1, 2)):
    calls(*sizes)
print("computed")
"""
REPEATED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have turned off
calls(3, 17, 140, 200)
print("computed", flush=True)
while True:
    calls(3, 17, 140, 200)
"""
BESIDE = """
import threading
has_called, held, kernels = threading.Event(), [], library.library(torch.float32)
run = kernels.run


def keep(*args):
    held.append((args, sys._getframe(1).f_locals))  # which have the memory of the call
    run(*args)


def repeat(args):
    while True:
        run(*args)
        has_called.set()


kernels.run = keep
call("broadcast_dot", torch.randn(140, 1, 200), torch.randn(300, 200))
for args, _ in held:
    has_called.clear()
    threading.Thread(target=repeat, args=(args,), daemon=True).start()
    has_called.wait()
print("computed", len(held), flush=True)
"""


def child(code, *args, **environment):
    """A process of Python that runs the code."""
    command, pipes = [sys.executable, "-c", CALLS + code, *map(str, args)], {"stdout": -1, "stderr": -1}
    return subprocess.Popen(command, env={**os.environ, **environment}, text=True, **pipes)


def sources():
    return sorted(map(str, library.FOLDER.glob("*.cpp")))


def runtime(name):
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@needs_library
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("vector_bytes", [32, 64])
@pytest.mark.parametrize("real", [torch.float32, torch.float64], ids=str)
def test_memory_is_used_as_it_may_be(tmp_path, vector_bytes, real):
    """The sanitizers of addresses and of undefined behaviour find nothing."""
    name = "avx2" + library.REALS[real]
    kinds = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sizes = [f"-DVECTOR_BYTES={vector_bytes}", f"-DREAL_BYTES={real.itemsize}"]
    target = ["-fPIC", "-shared", "-fvisibility=hidden", "-o", str(tmp_path / f"{name}.so")]
    subprocess.run(["g++", *FLAGS, *kinds, *sizes, *sources(), *target], check=True)
    (tmp_path / library.OUTCOME).write_text(json.dumps({"digest": "", name: ""}))
    runtimes = [runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    if not all(map(os.path.isabs, runtimes)):
        pytest.skip("needs the runtimes of g++'s sanitizers")
    options = {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}
    process = child(ALL_SIZES, tmp_path, str(real).removeprefix("torch."), **options)
    out, errors = process.communicate(timeout=SECONDS)
    assert (out, process.returncode) == ("computed\n", 0), errors
    assert "Sanitizer" not in errors
    assert "runtime error" not in errors


@needs_library
@needs_compiler
@pytest.mark.slow
def test_threads_do_not_race(tmp_path):
    """ThreadSanitizer finds nothing in a program whose threads it knows."""
    program, driver = tmp_path / "threads", Path(__file__).with_name("threads.cpp")
    kinds = ["-fsanitize=thread", "-pthread", "-DVECTOR_BYTES=32", "-DREAL_BYTES=4", f"-I{library.FOLDER}"]
    subprocess.run(["g++", *FLAGS, *kinds, *sources(), str(driver), "-o", str(program)], check=True)
    found = subprocess.run([program], capture_output=True, text=True, timeout=SECONDS)
    if "unexpected memory mapping" in found.stderr and shutil.which("setarch"):  # of a kernel with many random bits
        command = ["setarch", platform.machine(), "-R", program]
        found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if "unexpected memory mapping" in found.stderr or "personality" in found.stderr:
        pytest.skip("ThreadSanitizer does not start: " + found.stderr.strip())
    assert (found.stdout, found.returncode) == ("computed\n", 0), found.stderr
    assert "WARNING: ThreadSanitizer" not in found.stderr


@needs_library
@pytest.mark.slow
def test_a_call_can_be_interrupted():
    """Python raises KeyboardInterrupt when the call that runs has returned."""
    process = child(REPEATED)
    try:
        assert process.stdout.readline() == "computed\n", process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors


@needs_library
@pytest.mark.slow
def test_a_process_ends_while_threads_call():
    """These call the library alone: up to Python 3.13 a thread that ends inside of PyTorch aborts the process."""
    process = child(BESIDE)
    out, errors = process.communicate(timeout=SECONDS)
    assert (out, process.returncode) == ("computed 2\n", 0), errors
