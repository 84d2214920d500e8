"""The pages that lead through the code name files that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from holdfast_core.api import CheckpointAdoption

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "core": "core/src/holdfast_core",
    "operator": "operator/src/holdfast_operator",
    "sidecar": "sidecar/src/holdfast_sidecar",
    "sdk": "trainer_sdk/src/holdfast",
    "cli": "cli/src/holdfast_cli",
}


def section(page: str, title: str) -> str:
    return (ROOT / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_architecture_page_names_files_that_exist() -> None:
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
    assert len(example.splitlines()) <= 84


def adoption_example(name: str) -> tuple[CheckpointAdoption, dict[str, Any]]:
    """Return the CheckpointAdoption of an example, and the spec of the other object of the same name."""
    text = (ROOT / f"examples/adoption/{name}.yaml").read_text()
    own, other = yaml.safe_load_all(text)
    own["metadata"] |= {"namespace": "team-a", "uid": "u", "resourceVersion": "1"}
    assert own["metadata"]["name"] == other["metadata"]["name"]
    return CheckpointAdoption.from_dict(own), other["spec"]


def assert_adopts(adoption: CheckpointAdoption, template: dict[str, Any]) -> None:
    assert template["metadata"]["labels"] == {"holdfast.dev/adopt": adoption.name}
    (container,) = template["spec"]["containers"]
    assert container["name"] == adoption.spec.container


def test_the_page_on_adoption_shows_every_example() -> None:
    page = (ROOT / "docs/adoption.md").read_text()
    examples = sorted((ROOT / "examples/adoption").glob("*.yaml"))
    assert len(examples) == 2
    assert [e.name for e in examples if f"```yaml\n{e.read_text()}```\n" not in page] == []


def test_the_example_of_a_job_adopts_all_of_its_pods() -> None:
    adoption, job = adoption_example("job")
    assert adoption.spec.workers == job["completions"] == job["parallelism"]
    assert_adopts(adoption, job["template"])


def test_the_example_of_a_trainjob_adopts_the_container_that_trainer_names() -> None:
    adoption, job = adoption_example("trainjob")
    assert adoption.spec.workers == job["trainer"]["numNodes"]
    assert adoption.spec.container == "node"
