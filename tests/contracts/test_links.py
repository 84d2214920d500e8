"""The links of the documentation lead somewhere, and the commands that it shows exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OF_OTHERS = ("torchtitan.",)
"""Packages whose modules a page starts, and that this repository does not contain."""


FOLDERS = ("benchmarks", "charts", "demo", "docs", "examples", "testbed", "tests/frameworks")


@cache
def pages() -> tuple[Path, ...]:
    """Return the pages of the repository, without the fragments of the changelog."""
    below = (page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))
    found = [*ROOT.glob("*.md"), *(page for page in below if ".venv" not in page.parts)]
    return tuple(sorted(found))


def prose(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of the titles of a page, as GitHub derives them."""
    found: list[str] = []
    for title in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title.strip()).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        same = sum(
            one == anchor or re.fullmatch(rf"{anchor}-\d+", one) is not None for one in found
        )
        found.append(f"{anchor}-{same}" if same else anchor)
    return frozenset(found)


def is_broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return True
    return bool(anchor) and target.suffix == ".md" and anchor not in anchors(target)


def test_relative_links_lead_to_files_and_titles_that_exist() -> None:
    broken, followed = [], 0
    for page in pages():
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if "://" in link or link.startswith("mailto:"):
                continue
            followed += 1
            if is_broken(page, link):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert followed > 100
    assert broken == []


def test_targets_of_make_that_are_shown_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {
        (str(page.relative_to(ROOT)), target)
        for page in pages()
        for target in re.findall(
            r"(?:^|`|\$ )make ([a-z][a-z0-9-]*)", page.read_text(), re.MULTILINE
        )
    }
    assert len(shown) > 20
    assert {one for one in shown if one[1] not in targets} == set()


def test_modules_that_are_started_with_python_exist() -> None:
    missing = []
    for page in pages():
        for name in re.findall(r"python3? -m ([\w.]+)", page.read_text()):
            path = ROOT / name.rstrip(".").replace(".", "/")
            there = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
            if not there and not name.startswith(OF_OTHERS):
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert missing == []
