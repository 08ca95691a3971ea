"""Write the figures of README.md and docs/*.md, and draw the pictures, from the committed results: one command.

    python docs/figures.py            # write
    python docs/figures.py --check    # exit with 1 where a text or a picture does not follow from the results

A text between `<!-- figures: NAME -->` and `<!-- end -->` is that of the function in TEXTS of tables.py.
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tables import DOCS, ONE_OP, ROOT, TEXTS, TRAINING, content, founding_rows

BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def draw_founding(axes: Any) -> None:
    rows = sorted((row for row in founding_rows() if not row["is_peer"]), key=lambda row: -row["time_ms"])
    names = [row["variant"] for row in rows]
    for axis, key, scale, label in zip(
        axes, ("temporary_bytes", "time_ms"), (2**20, 1), ("temporary memory, MiB", "time, ms")
    ):
        values = [row[key] / scale for row in rows]
        bars = axis.barh(names, values, color=["#c44e52" if name == "naive" else "#4c72b0" for name in names])
        axis.bar_label(bars, [f"{value:,.1f}" if value < 10 else f"{value:,.0f}" for value in values], padding=3)
        axis.set(xscale="log", xlabel=label, xlim=(min(values) / 2, max(values) * 6))


def draw_training(axes: Any) -> None:
    peaks = content(TRAINING)["peaks"]
    (axis,) = axes
    for mark, key, label in (("o", "measured_bytes", "measured"), ("x", "predicted_bytes", "predicted")):
        axis.plot([peak[key] / 2**20 for peak in peaks], mark, label=label, fillstyle="none", markersize=9)
    names = [f"{peak['architecture']}, {peak['way']}, {peak['batch_size']}" for peak in peaks]
    axis.set_xticks(range(len(peaks)), names, rotation=90, fontsize=7)
    axis.set(ylabel="peak of a training step, MiB", yscale="log")
    axis.legend()


PICTURES: Mapping[str, tuple[Path, Callable[[Any], None], int]] = {
    "founding.svg": (ONE_OP, draw_founding, 2),
    "training.svg": (TRAINING, draw_training, 1),
}


def source_of(result: Path) -> str:
    return f"{result.relative_to(ROOT)} {hashlib.sha256(result.read_bytes()).hexdigest()}"


def draw(name: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    result, draw_axes, panels = PICTURES[name]
    with matplotlib.rc_context({"svg.hashsalt": name, "font.size": 9}):
        figure, axes = pyplot.subplots(1, panels, figsize=(9, 2.6 if panels > 1 else 3.6), squeeze=False, sharey=True)
        draw_axes(axes[0])
        figure.savefig(DOCS / name, bbox_inches="tight", metadata={"Date": None, "Description": source_of(result)})


def written(text: str) -> str:
    return BLOCK.sub(lambda block: f"{block[1]}{TEXTS[block[2]]()}\n{block[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where something differs")
    check = parser.parse_args().check
    stale = []
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        old = page.read_text()
        new = written(old)
        if new != old:
            stale.append(page.name)
            if not check:
                page.write_text(new)
    for name, (result, _, _) in PICTURES.items():
        picture = DOCS / name
        if not picture.exists() or source_of(result) not in picture.read_text():
            stale.append(name)
            if not check:
                draw(name)
    if stale:
        print(f"{'differ from the results' if check else 'written'}: {', '.join(stale)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
