"""One place names the version, and every other file repeats it."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from tools.release import notes, version

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files of this repository that name the version."""
    for path in (version.PROJECT, notes.CHANGELOG, *version.files(ROOT)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((ROOT / path).read_text())
    return tmp_path


def test_a_new_version_is_written_to_every_file_that_names_it(tree: Path) -> None:
    version.main(["12.34.56"], tree)

    assert version.of(tree) == "12.34.56"
    for member in version.MEMBERS:
        about = tomllib.loads((tree / member / "pyproject.toml").read_text())["project"]
        assert about["version"] == "12.34.56", member
        extras = about.get("optional-dependencies", {}).values()
        required = [*about["dependencies"], *(one for extra in extras for one in extra)]
        ours = [one for one in required if one.startswith("holdfast")]
        assert all(one.endswith("==12.34.56") for one in ours), (member, ours)
        assert ours or member == "core", member
    chart = yaml.safe_load((tree / version.CHART).read_text())
    assert (chart["version"], chart["appVersion"]) == ("12.34.56", "12.34.56")
    assert "holdfast/sdk:12.34.56" in (tree / version.PAGE).read_text()
    for lock in version.LOCKS:
        packages = tomllib.loads((tree / lock).read_text())["package"]
        members = [one for one in packages if "editable" in one["source"]]
        assert len(members) >= 3
        assert {one["version"] for one in members} == {"12.34.56"}, lock


def test_a_new_version_leaves_the_versions_of_other_packages_alone(tree: Path) -> None:
    changed = {path: (tree / path).read_text().splitlines() for path in version.files(tree)}
    version.main(["12.34.56"], tree)

    for path, before in changed.items():
        for old, new in zip(before, (tree / path).read_text().splitlines(), strict=True):
            assert old == new or "12.34.56" in new, (path, old, new)
            assert old == new or version.of(ROOT) in old, (path, old, new)


def test_the_lock_is_valid_for_a_new_version(tree: Path) -> None:
    version.main(["12.34.56"], tree)
    for member in version.MEMBERS:
        (tree / member / "src").mkdir()
    done = subprocess.run(
        ["uv", "lock", "--check", "--offline"], cwd=tree, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text", ["", "1.2", "v1.2.3", "1.2.3rc1", "1.2.3-rc.1", "01.2.3", "1.2.3\n"]
)
def test_a_version_with_two_meanings_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected three numbers"):
        version.parse(text)
