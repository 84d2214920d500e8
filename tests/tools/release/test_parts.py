"""Parts of a release without the network: packages by Python, the copy to a volume, krew, notes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tools.release import copy_to, krew, notes, trees

WHERE = {"homepage": "https://x.example", "downloads": "https://x.example/files"}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def names(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_a_package_with_compiled_modules_stays_whole_beside_its_python(tmp_path: Path) -> None:
    plain = {"pure/__init__.py": "", "pure/deep/x.py": "x = 1", "one.py": ""}
    old = tree(tmp_path / "3.11", plain | {"fast/__init__.py": "", "fast/c.so": "for 3.11"})
    new = tree(tmp_path / "3.12", plain | {"fast/__init__.py": "", "fast/c.so": "for 3.12"})

    trees.share([old, new], tmp_path / "common")

    assert names(tmp_path / "common") == ["one.py", "pure/__init__.py", "pure/deep/x.py"]
    assert names(old) == names(new) == ["fast/__init__.py", "fast/c.so"]


def test_a_package_that_one_python_lacks_stays_beside_the_others(tmp_path: Path) -> None:
    old = tree(tmp_path / "3.11", {"backport.py": "", "same.py": ""})
    new = tree(tmp_path / "3.12", {"same.py": ""})
    trees.share([old, new], tmp_path / "common")
    assert names(old) == ["backport.py"]
    assert names(new) == []


def test_a_python_without_packages_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    start = trees.start_script(trees.Program("tool", "x", "x"), ("2.7", "3.9"))
    (tmp_path / "tool").write_text(start)
    done = subprocess.run([sys.executable, tmp_path / "tool"], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"is Python {sys.version_info.major}.{sys.version_info.minor}" in done.stderr
    assert "has packages for Python 2.7, 3.9 only" in done.stderr


def image(root: Path, version: str) -> Path:
    return tree(root, {"copy_to.py": "", "bin/holdfast": version, f"common/{version}.py": ""})


def test_a_volume_gets_the_new_version_in_place_of_the_old_one(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    assert copy_to.main(image(tmp_path / "old", "1"), volume) is None
    assert copy_to.main(image(tmp_path / "new", "2"), volume) is None
    assert names(volume) == [copy_to.MARK, "bin/holdfast", "common/2.py"]
    assert (volume / "bin/holdfast").read_text() == "2"


@pytest.mark.fault("A copy of the SDK to a volume is interrupted")
def test_a_copy_that_was_interrupted_at_its_first_file_is_repeated(tmp_path: Path) -> None:
    volume = tree(tmp_path / "volume", {copy_to.MARK: "", "common/half.py": ""})
    assert copy_to.main(image(tmp_path / "image", "1"), volume) is None
    assert names(volume) == [copy_to.MARK, "bin/holdfast", "common/1.py"]


def test_a_volume_that_cannot_be_written_is_named_with_what_to_do(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / copy_to.MARK).symlink_to(tmp_path / "absent" / "file")  # root may write everywhere
    problem = copy_to.main(image(tmp_path / "image", "1"), volume)
    assert str(volume) in problem and "fsGroup" in problem


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    volume = tree(tmp_path / "volume", {"bin/python3": "the user's"})
    assert "has files that are not Holdfast's (bin)" in str(
        copy_to.main(image(tmp_path / "image", "1"), volume)
    )
    assert names(volume) == ["bin/python3"]


def test_a_volume_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    error = copy_to.main(image(tmp_path / "image", "1"), tmp_path / "volume")
    assert "volume is no folder" in error


def test_krew_finds_each_platform_by_its_labels() -> None:
    found = krew.manifest("1.2.3", {("linux", "arm64"): ("plugin.tar.gz", "0" * 64)}, WHERE)
    assert found["metadata"] == {"name": "holdfast"}
    assert found["spec"]["version"] == "v1.2.3"
    assert found["spec"]["platforms"] == [
        {
            "selector": {"matchLabels": {"os": "linux", "arch": "arm64"}},
            "uri": "https://x.example/files/v1.2.3/plugin.tar.gz",
            "sha256": "0" * 64,
            "bin": "bin/kubectl-holdfast",
        }
    ]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    files = {
        "CHANGELOG.md": "# Changelog\n\nWords.\n\n## 1.0.0\n\n* First.\n",
        "changes/0002-b.md": "Second\nthing.\n",
        "changes/0003-c.md": "Third.\n",
    }
    return tree(tmp_path, files)


FOLDED = """# Changelog

Words.

## 1.1.0

* Second thing.
* Third.

## 1.0.0

* First.
"""


def test_fragments_become_the_first_section_of_the_changelog(repository: Path) -> None:
    before = notes.changes(repository, "1.1.0")
    notes.fold(repository, "1.1.0")
    assert (repository / "CHANGELOG.md").read_text() == FOLDED
    assert [*(repository / "changes").iterdir()] == []
    assert before == ["Second\nthing.", "Third."]
    assert notes.changes(repository, "1.1.0") == ["Second thing.", "Third."]
    assert notes.changes(repository, "1.0.0") == ["First."]


def test_folding_again_after_an_interruption_repeats_no_change(repository: Path) -> None:
    third = (repository / "changes/0003-c.md").read_text()
    notes.fold(repository, "1.1.0")
    (repository / "changes/0003-c.md").write_text(third)
    notes.fold(repository, "1.1.0")
    assert (repository / "CHANGELOG.md").read_text() == FOLDED


def test_a_change_after_the_fold_is_added_to_the_section(repository: Path) -> None:
    notes.fold(repository, "1.1.0")
    (repository / "changes/0004-d.md").write_text("Fourth.\n")
    notes.fold(repository, "1.1.0")
    assert notes.changes(repository, "1.1.0") == ["Second thing.", "Third.", "Fourth."]
    assert notes.changes(repository, "1.0.0") == ["First."]
