"""The words of the house: one name for one thing, and a glossary that the code keeps."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("runtime", "adapters", "actors", "spark_bridge", "cli")


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Each module of the product: its path from the root, and its syntax tree."""
    for floor in PRODUCT:
        for path in sorted((ROOT / floor).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


@pytest.mark.slow
def test_no_two_public_classes_share_a_name_but_the_same_part_of_two_adapters():
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    for name, found in places.items():
        adapters = [match[1] for path in found if (match := re.match(r"adapters/(\w+)/", path))]
        parallel = len(set(adapters)) == len(found)
        assert len(found) == 1 or parallel, f"{name} means several things: {', '.join(found)}"


def glossary() -> list[tuple[str, list[str]]]:
    """The rows of the glossary: a word, and the names in the code that bear it out."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line[:1] == "|"]
    return [(word, re.findall(r"`(\w+)`", names)) for word, _, names in rows[2:]]


@pytest.mark.slow
def test_each_word_of_the_glossary_is_a_name_in_the_code():
    words: set[str] = set()
    for path, tree in modules():
        words |= {Path(path).stem, Path(path).parent.name}
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                words.add(node.name)
            elif isinstance(node, (ast.AnnAssign, ast.Assign)):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                words |= {target.id for target in targets if isinstance(target, ast.Name)}
    rows = glossary()
    assert len(rows) > 40
    for word, names in rows:
        assert names, f"{word}: no name in the code"
        assert set(names) <= words, f"{word}: {set(names) - words} is no name in the code"
    assert len({word for word, _ in rows}) == len(rows)
