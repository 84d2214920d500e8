"""Metrics, fields, settings and decisions that the documentation names exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from holdfast_core.contract import StoreVerb

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = ("core", "operator", "sidecar", "trainer_sdk", "cli")
REFERENCE = ROOT / "docs/reference"
WITH_DECISIONS = ("tests", "tools", "testbed", "benchmarks", "demo", "charts", "examples")
"""Folders beside those of the members whose files name decisions."""
PACKAGES = re.compile(r"holdfast_(core|operator|sidecar|sdk|cli)\b")
OF_OTHER_KINDS = {"spec.nodeName", "spec.trainer"}
"""Fields of pods and of TrainJobs that a page names without the kind."""


def pages() -> Iterator[tuple[str, str]]:
    """Yield name and text of the pages for users, without the generated reference."""
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        yield page.name, page.read_text()


def test_metrics_on_pages_exist() -> None:
    metrics = set(re.findall(r"`(holdfast_\w+)`", (REFERENCE / "metrics.md").read_text()))
    named = {
        (page, name)
        for page, text in pages()
        for name in re.findall(r"\bholdfast_[a-z_]+\b", text)
        if not PACKAGES.match(name)
    }
    assert len(named) > 20
    assert {one for one in named if one[1] not in metrics} == set()


def test_fields_on_pages_exist() -> None:
    listed = re.findall(r"`((?:spec|status)\.[\w.\[\]]+)`", (REFERENCE / "api.md").read_text())
    fields = {name.replace("[]", "") for name in listed}
    fields |= {name.rsplit(".", depth)[0] for name in fields for depth in range(1, name.count("."))}
    named = {
        (page, name)
        for page, text in pages()
        for name in re.findall(r"`((?:spec|status)\.[a-zA-Z][a-zA-Z.]*)[`: ]", text)
    }
    assert len(named) > 20
    assert {one for one in named if one[1] not in fields | OF_OTHER_KINDS} == set()


def test_environment_variables_on_pages_are_read_somewhere() -> None:
    folders = (*(f"{member}/src" for member in MEMBERS), "testbed", "tests/support")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    read = {name for path in sources for name in re.findall(r"HOLDFAST_[A-Z_]+", path.read_text())}
    read |= {verb.variable for verb in StoreVerb}
    named = {
        (page, name) for page, text in pages() for name in re.findall(r"HOLDFAST_[A-Z_]+", text)
    }
    assert len(named) > 4
    assert {one for one in named if one[1] not in read} == set()


def test_decisions_that_are_named_exist() -> None:
    records = {path.name[:4] for path in (ROOT / "docs/adr").glob("*.md")}
    folders = (*(f"{member}/src" for member in MEMBERS), *WITH_DECISIONS)
    texts = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    texts += [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in {".py", ".yaml", ".md", ".sh", ".go"} and ".venv" not in path.parts
    ]
    named = {
        (str(path.relative_to(ROOT)), number)
        for path in texts
        for number in re.findall(r"\bADR (\d{4})\b", path.read_text())
    }
    assert len(named) > 100
    assert {one for one in named if one[1] not in records} == set()


def test_the_title_of_a_decision_states_its_rule() -> None:
    """`# 0007: Silence is no loss` can be right or wrong. `# 0007: Silent sidecars` cannot."""
    titles = [
        path.read_text().partition("\n")[0]
        for path in sorted((ROOT / "docs/adr").glob("[0-9]*.md"))
    ]
    assert [title[2:6] for title in titles] == [f"{n:04}" for n in range(1, len(titles) + 1)]
    assert [title for title in titles if len(title.split()) < 5] == []
