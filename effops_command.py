"""Where the `effops` command starts: outside the package, which imports PyTorch, so that help takes no seconds."""

import importlib.util
from pathlib import Path


def main() -> int:
    """Run `effops/commands/main.py`, which imports effops where a subcommand runs; returns the exit code."""
    package = importlib.util.find_spec("effops")
    assert package is not None
    assert package.origin is not None
    spec = importlib.util.spec_from_file_location("effops_main", Path(package.origin).parent / "commands" / "main.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return int(module.main())
