"""The pages that lead through the code name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "core": "core/src/holdfast_core",
    "operator": "operator/src/holdfast_operator",
    "sidecar": "sidecar/src/holdfast_sidecar",
    "sdk": "trainer_sdk/src/holdfast",
}


def section(page: str, title: str) -> str:
    return (ROOT / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_journeys_of_the_architecture_page_name_files_that_exist() -> None:
    folder, missing, found = "", [], 0
    for name in re.findall(
        r"`([\w/]+\.py)`", section("docs/architecture.md", "Which file does what")
    ):
        top, _, rest = name.partition("/")
        if top in SOURCES:
            path = ROOT / SOURCES[top] / rest
            folder = str(path.parent)
        else:
            path = Path(folder) / name
        found += 1
        missing += [] if path.is_file() else [name]
    assert found > 50
    assert missing == []


def test_contributing_names_paths_that_exist() -> None:
    named = re.findall(
        r"`((?:core|operator|sidecar|trainer_sdk|tests|docs|charts)/[\w/.]+)`",
        (ROOT / "CONTRIBUTING.md").read_text(),
    )
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists() and "..." not in name] == []


def test_the_example_of_an_object_store_is_the_file_that_the_suite_runs() -> None:
    example = (ROOT / "examples/object_store/sqlite_store.py").read_text()
    assert f"```python\n{example}```\n" in (ROOT / "docs/extending.md").read_text()
    assert len(example.splitlines()) <= 80
