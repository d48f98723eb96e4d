"""What the site has beside the pages of `docs/`: README, CHANGELOG and other pages of the tree, and the reference of
the API. A hook of MkDocs (`mkdocs.yml`); on GitHub the pages are read where they lie.

A link between two pages is written as it is from the one file to the other; where a page has another place in the site
its links are moved with it. A link that leads nowhere stays as it is, and MkDocs ends the build with a warning.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

# Pages and files of the tree that docs/ does not hold; README.md is the first page of the site.
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "compose/README.md")
EXAMPLES = ("README.md", "*.py", "*.ipynb")

# The faces of the package, in the order in which their names are described: each name once, where it is met first.
FACES = (
    "tidewal",
    "tidewal.errors",
    "tidewal.actors",
    "tidewal.runtime",
    "tidewal.spark_bridge",
    "tidewal.adapters",
    "tidewal.runtime.testing",
)
MODULES = {"tidewal.errors": "tidewal.runtime.errors"}  # a face that is a module, and where it lies
PACKAGES = ("__init__.py", "runtime", "adapters", "actors", "spark_bridge")

LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")

_package: Path | None = None


@event_priority(100)  # before mkdocstrings reads its settings
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let mkdocstrings find the package: its root is the root of the tree, which holds more than the package."""
    global _package
    _package = Path(tempfile.mkdtemp(prefix="tidewal-api-"))
    (_package / "tidewal").mkdir()
    for name in PACKAGES:
        (_package / "tidewal" / name).symlink_to(ROOT / name)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(_package)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that lie elsewhere, and those of the API."""
    for path in outside():
        files.append(File.generated(config, place_in_site(path), abs_src_path=str(ROOT / path)))
    for name, text in api_pages().items():
        files.append(File.generated(config, f"api/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Move the links of a page to where their targets are in the site."""
    here = page.file.src_uri
    source = place_in_tree(here)

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        if (ROOT / target / "README.md").is_file():
            target = f"{target}/README.md"
        there = place_in_site(target)
        if files.get_file_from_path(there) is None:
            return found[0]
        return f"]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{found[2] or ''})"

    return LINK.sub(moved, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Remove what `on_config` made."""
    if _package is not None:
        shutil.rmtree(_package)


def outside() -> list[str]:
    """The pages and files of the tree, outside docs/, that the site has."""
    pages = [page for page in PAGES if (ROOT / page).is_file()]
    examples = [path for pattern in EXAMPLES for path in (ROOT / "examples").rglob(pattern)]
    return [*pages, *sorted(path.relative_to(ROOT).as_posix() for path in examples)]


def place_in_site(path: str) -> str:
    """Where a file of the tree is in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def place_in_tree(place: str) -> str:
    """The file of the tree that is at this place in the site."""
    if place == "index.md":
        return "README.md"
    return place if place in outside() else f"docs/{place}"


def api_pages() -> dict[str, str]:
    """A page for each face, in the words of mkdocstrings."""
    pages: dict[str, str] = {}
    described: dict[int, tuple[str, str]] = {}  # by the identity of what is described: module and name
    for face in FACES:
        module = MODULES.get(face, face)
        names, also = list[str](), list[str]()
        for name in names_of(face):
            value = getattr(import_module(module), name)
            if id(value) in described:
                also.append("[`{1}`]({0}.md#{0}.{1})".format(*described[id(value)]))
            elif not isinstance(value, ModuleType):  # `errors` is a face of its own
                described[id(value)] = (module, name)
                names += [f"::: {module}.{name}", ""]
        elsewhere = ["Described elsewhere: " + ", ".join(also) + ".", ""] if also else []
        head = [f"# {face}", "", f"::: {module}", *_WITHOUT_MEMBERS, ""]
        pages[face] = "\n".join([*head, *elsewhere, *names])
    return pages


_WITHOUT_MEMBERS = (
    "    options:",
    "        members: false",
    "        show_root_heading: false",
    "        show_root_toc_entry: false",
)


def names_of(face: str) -> list[str]:
    """The public names of a face, those of a module in the order of their definition."""
    module = import_module(MODULES.get(face, face))
    if face in MODULES:
        return [name for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__]
    return sorted(module.__all__, key=str.lower)
