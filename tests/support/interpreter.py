"""Triton's interpreter as tests run it: without what it repeats, and as strict in all versions as in the newest."""

import contextlib
import importlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def quick_interpreter() -> Iterator[None]:
    """Patch triton.language once in a launch, describe each type once, and refuse masks that are not boolean.

    Most of the interpreter's time goes into what does not depend on the numbers. It patches triton.language anew in
    every call of a device function, and describes the same types for every tensor.

    A block of booleans `&` a number's comparison is a mask of integers. Triton 3.9 refuses it, and earlier versions
    take it.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    core = importlib.import_module("triton.language.core")
    run_grid, patch, numpy_dtype = interpreter.GridExecutor.__call__, interpreter._patch_lang, interpreter._get_np_dtype
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    patched, numpy_dtypes, blocks = set(), {}, {}

    def run_grid_afresh(grid, *args, **kwargs):
        patched.clear()
        return run_grid(grid, *args, **kwargs)

    def patch_once(function):
        if function.__module__ in patched:
            return interpreter._LangPatchScope()
        patched.add(function.__module__)
        return patch(function)

    def numpy_dtype_once(dtype):
        if dtype.scalar.name not in numpy_dtypes:
            numpy_dtypes[dtype.scalar.name] = numpy_dtype(dtype)
        return numpy_dtypes[dtype.scalar.name]

    def make_block_once(block, element, shape):
        key = (element.name, *map(core._unwrap_if_constexpr, shape))
        if key not in blocks:
            make_block(block, element, shape)
            # This is a copy: CPython 3.13 may empty objects that only the kept dictionary of another object reaches.
            blocks[key] = {**vars(block), "of_tensors": {}}
        vars(block).update(blocks[key])

    def make_tensor_once(tensor, handle, dtype):
        of_tensors = vars(dtype).setdefault("of_tensors", {})  # that of equal blocks is one
        if not of_tensors:
            make_tensor(tensor, handle, dtype)
            of_tensors.update((name, value) for name, value in vars(tensor).items() if name != "handle")
        vars(tensor).update(of_tensors, handle=handle)

    def load_strictly(self, pointers, mask, *others, **options):
        assert mask.data.dtype == bool, f"a mask must be boolean, got {mask.data.dtype}"
        return load(self, pointers, mask, *others, **options)

    def store_strictly(self, pointers, value, mask, *others, **options):
        assert mask.data.dtype == bool, f"a mask must be boolean, got {mask.data.dtype}"
        return store(self, pointers, value, mask, *others, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_grid_afresh)
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_dtype_once)
        monkeypatch.setattr(builder, "create_masked_load", load_strictly)
        monkeypatch.setattr(builder, "create_masked_store", store_strictly)
        monkeypatch.setattr(core.block_type, "__init__", make_block_once)
        monkeypatch.setattr(core.tensor, "__init__", make_tensor_once)
        yield
