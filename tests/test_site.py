"""The documentation as a site: it builds without a warning, every link leads somewhere, and it needs no network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
BUILD = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # with --quiet, MkDocs counts no warning

pytestmark = pytest.mark.xdist_group("site")


class Links(HTMLParser):
    """What a page links to, what it loads, and what can be linked to in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.linked: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.linked.append(given["href"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.loaded.append(given.get("href", ""))
        elif "src" in given:
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs-site` does."""
    pytest.importorskip("mkdocs")
    directory = tmp_path_factory.mktemp("site")
    built = build(ROOT, directory)
    assert built.returncode == 0, built.stdout + built.stderr
    return directory


def build(tree: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [*BUILD, "--site-dir", str(directory)]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def broken_links(site: Path) -> list[str]:
    pages = {page: Links(page) for page in site.rglob("*.html")}
    broken: list[str] = []
    for page, found in pages.items():
        for link in found.linked:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].ids):
                broken.append(f"{page.relative_to(site)}: {link}")
    return broken


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_every_link_leads_somewhere(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 30
    assert broken_links(site) == []


@pytest.mark.slow
def test_a_broken_link_is_found(site: Path, tmp_path: Path) -> None:
    shutil.copytree(site, tmp_path / "site")
    page = tmp_path / "site" / "groups.html"
    page.write_text(
        page.read_text(encoding="utf-8").replace('href="streams.html"', 'href="gone.html"'), encoding="utf-8"
    )
    assert "groups.html: gone.html" in broken_links(tmp_path / "site")


@pytest.mark.slow
def test_the_site_is_read_without_a_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        outside = [each for each in Links(page).loaded if urlsplit(each).netloc]
        assert outside == [], page.name


@pytest.mark.slow
def test_every_public_name_is_described(site: Path) -> None:
    import tidewal

    ids = set[str]().union(*(Links(page).ids for page in (site / "api").glob("*.html")))
    assert [name for name in tidewal.__all__ if name != "errors" and f"tidewal.{name}" not in ids] == []
    assert {"tidewal.Client.insert", "tidewal.runtime.errors.PositionLost", "tidewal.spark_bridge.latest"} <= ids


@pytest.mark.slow
def test_a_page_is_shown_as_it_is_meant(site: Path) -> None:
    """What GitHub shows as a list or a table and Python's Markdown does not stands there as text."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre>.*?</pre>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert re.findall(r"^(?:- \S|\|[- |]+\|$).*", text, re.MULTILINE) == [], page


@pytest.mark.slow
def test_a_warning_ends_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[nowhere](nowhere.md)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: one page\n")
    assert build(tmp_path, tmp_path / "out").returncode != 0


def test_the_pages_are_in_the_navigation() -> None:
    """A page of the tutorials and guides that nobody is led to is not read."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f" {page}\n" not in nav] == []
