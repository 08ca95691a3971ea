"""How large folders, files and functions may be."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATHS = [path.relative_to(ROOT) for top in ("effops", "kernels") for path in (ROOT / top).rglob("*.py")]


def test_sizes():
    folders = [path.parent for path in PATHS]
    sizes = [(f"{one}: modules", folders.count(one), 8 if one.name == "effops" else 16) for one in set(folders)]
    sizes += [(f"{one}: folders below effops", len(one.parts) - 1, 3) for one in set(folders)]
    for kernel in (ROOT / "kernels" / "cpp").glob("*.[ch]*"):
        sizes.append((f"{kernel.name}: lines", len(kernel.read_text().splitlines()), 600))
    for path in PATHS:
        text = (ROOT / path).read_text()
        sizes.append((f"{path}: lines", len(text.splitlines()), 600 if path.parts[0] == "kernels" else 500))
        for one in ast.walk(ast.parse(text)):
            if isinstance(one, ast.FunctionDef):
                sizes.append((f"{path}:{one.lineno}: lines of {one.name}", one.end_lineno - one.lineno + 1, 80))
    wrong = [f"{what}: {count}, at most {most}" for what, count, most in sizes if count > most]
    assert not wrong, "\n".join(["", *wrong])
