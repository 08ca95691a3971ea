"""The site builds without a warning, has every page, and asks no other host for anything."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


class Sources(HTMLParser):
    """What a browser fetches for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        fetched = {"script": "src", "img": "src", "link": "href", "iframe": "src", "object": "data"}
        if tag in fetched and given.get("rel") != "canonical":
            self.found.append(given.get(fetched[tag]) or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", folder / "kept", ROOT / "docs"]
    built = subprocess.run([*command, folder / "html"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "html"


@pytest.mark.slow
def test_every_page_is_there(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").exists(), page


@pytest.mark.slow
def test_nothing_is_asked_of_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        sources = Sources()
        sources.feed(page.read_text())
        assert not [one for one in sources.found if "//" in one], page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?(?:https?:)?//[^)]*\)|@import", sheet.read_text()), sheet
