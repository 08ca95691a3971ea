"""Compile the shipped kernels for devices that are not here, and print what each needs, as JSON lines.

    python kernels_aot.py PART COUNT [all]        one of so many parts: of the launches that differ much, or of all

A process of its own, because Triton either compiles or interprets for the whole life of a process.
"""

import functools
import json
import re
import subprocess
import sys
import tempfile
import zlib

import torch
import triton
from effops.kernels import additive, attention, distances, log_sparse, mixture, pairs, power_spherical, von_mises_fisher
from effops.kernels.launch import OPTIONS, distinct
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
COMPILER_OPTIONS = ("num_warps", "num_stages", "maxnreg")
POINTERS = {torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64"}


def compile_launch(architecture, launch):
    """Specialise the arguments as a call does: 1 and None become constants, multiples of 16 are known to be."""
    names = launch.kernel.arg_names
    options = {name: value for name, value in launch.constants.items() if name in COMPILER_OPTIONS}
    constants = {name: value for name, value in launch.constants.items() if name not in options}
    signature, attributes = {}, {}
    for index, (name, value) in enumerate(zip(names, (0, *launch.args), strict=False)):
        if value is None or (isinstance(value, int) and value == 1):
            constants[name] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            default = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
            signature[name] = launch.kernel.params[index].annotation_type or default
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in names}
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGETS[architecture], options=options | OPTIONS)


def resources(architecture, compiled):
    if architecture == "gfx942":
        text = compiled.asm["amdgcn"]
        registers, spills, local = (
            int(re.search(rf"\.{key}: +(\d+)", text).group(1))
            for key in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
        )
    else:
        text = compiled.asm["ptx"]
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        registers, spills, local = (
            int(re.search(rf"{key}:(\d+)", usage).group(1)) for key in ("REG", "STACK", "LOCAL")
        )
    return {
        "registers": registers,
        "spill_bytes": spills + local,
        "shared_bytes": compiled.metadata.shared,
        "tmem": getattr(compiled.metadata, "tmem_size", None) or 0,
        "stores": len(re.findall(r"\bst\.global|\bglobal_store|\bbuffer_store", text)),
    }


def describe(launch):
    values = {name: getattr(value, "__name__", str(value)) for name, value in launch.constants.items()}
    inputs = next(value for value in launch.args if isinstance(value, torch.Tensor)).dtype
    name = f"{launch.kernel.__module__}.{launch.kernel.__name__}"
    score = getattr(launch.constants.get("phi"), "__module__", launch.kernel.__module__)
    return {"kernel": name, "map": score, "inputs": str(inputs), **values}


def every():
    for family in pairs, mixture:
        yield from distinct(functools.partial(family.representatives, power_spherical.MAP))
        yield from distinct(functools.partial(family.representatives, von_mises_fisher.MAP))
    for family in distances, log_sparse, attention, additive:
        yield from distinct(family.representatives)


def alike(architecture, launch):
    """What launches have in common of which one is compiled: more than their configuration where architectures differ.

    Without a product they differ little. The NVIDIA ones differ most in exact products of float32, which hold more than
    others; narrower dtypes are converted first. The second map has the products and the tiles of the first.
    """
    if launch.constants.get("phi") is von_mises_fisher.MAP.phi:
        return architecture, launch.kernel
    dtype = next(value.dtype for value in launch.args if isinstance(value, torch.Tensor))
    precision = launch.constants.get("PRECISION")
    if precision is None:
        architecture = "any"
    elif architecture != "gfx942" and (dtype, precision) != (torch.float32, "tf32x3"):
        architecture = "sm"
    given = tuple(value is not None for value in launch.args)
    return architecture, launch.kernel, given, *launch.constants.items()


def turn(launch, count):
    """A number below `count` that follows from the launch alone."""
    return zlib.crc32(json.dumps(describe(launch)).encode()) % count


def shipped():
    """Of launches that are alike one, so that architectures, dtypes and tiles take turns."""
    groups = {}
    for architecture, launch in every():
        groups.setdefault(alike(architecture, launch), []).append((architecture, launch))
    return [group[turn(group[0][1], len(group))] for group in groups.values()]


def main(part, count, which=""):
    launches = every() if which == "all" else shipped()
    for architecture, launch in launches:
        if turn(launch, int(count)) == int(part):
            compiled = compile_launch(architecture, launch)
            entry = {"architecture": architecture, **describe(launch), **resources(architecture, compiled)}
            print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
