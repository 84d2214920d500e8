"""What `make release` refuses: files that are not those of a commit, and folders of another release."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tools.release.__main__ import build, main
from tools.release.source import (
    RECORD,
    SUMS,
    Checkout,
    ReleaseError,
    Source,
    read_checkout,
    refuse_checkout,
    refuse_folder,
)

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="a checkout needs git")
SOURCE = Source("1.2.3", "a" * 40, 1_700_000_000)


def git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1.2.3"\n')
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "x", "--date", "2026-01-01T00:00:00Z")
    return root


def refusal_of(root: Path) -> str:
    with pytest.raises(ReleaseError) as found:
        refuse_checkout(read_checkout(root))
    return str(found.value)


@pytest.mark.parametrize("tags", [(), ("v1.2.3",), ("v1.2.3", "demo")])
def test_a_clean_checkout_with_the_tag_of_its_version_is_released(
    checkout: Path, tags: tuple[str, ...]
) -> None:
    for tag in tags:
        git(checkout, "tag", tag)
    found = read_checkout(checkout)
    refuse_checkout(found)
    assert found.source.version == "1.2.3"
    assert len(found.source.revision) == 40


def test_a_changed_file_is_refused_by_its_name(checkout: Path) -> None:
    (checkout / "pyproject.toml").write_text('[project]\nname = "y"\nversion = "1.2.3"\n')
    assert "differs from commit" in refusal_of(checkout)
    assert "M pyproject.toml" in refusal_of(checkout)


def test_a_file_that_git_does_not_know_is_refused_by_its_name(checkout: Path) -> None:
    (checkout / "new.py").touch()
    assert "?? new.py" in refusal_of(checkout)


def test_a_tag_of_another_version_is_refused_with_both(checkout: Path) -> None:
    git(checkout, "tag", "v1.3.0")
    assert "tag v1.3.0, but pyproject.toml names version 1.2.3" in refusal_of(checkout)


def test_a_folder_without_git_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="built from a checkout of git"):
        read_checkout(tmp_path)


def test_the_command_says_what_is_wrong_and_writes_nothing(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "new.py").touch()
    assert main([], checkout) == 1
    assert "the release was not built: the checkout differs" in capsys.readouterr().err
    assert not (checkout / "dist").exists()


def test_parts_of_one_release_are_added_to_each_other(tmp_path: Path) -> None:
    build(Path(), SOURCE, tmp_path, [])
    (tmp_path / "holdfast-1.2.3.tgz").write_text("chart")
    build(Path(), SOURCE, tmp_path, [])
    listed = (tmp_path / SUMS).read_text()
    assert [line.split()[1] for line in listed.splitlines()] == ["holdfast-1.2.3.tgz", RECORD]
    check = ["sha256sum", "--check", "--strict", SUMS]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 0


def test_a_folder_with_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    build(Path(), SOURCE, tmp_path, [])
    (tmp_path / "holdfast_core-1.2.2-py3-none-any.whl").touch()
    with pytest.raises(ReleaseError, match=r"another version than 1\.2\.3: holdfast_core-1\.2\.2"):
        refuse_folder(tmp_path, SOURCE)


@pytest.mark.parametrize(
    "other", [Source("1.2.2", "a" * 40, 1), Source("1.2.3", "b" * 40, 1)], ids=["version", "commit"]
)
def test_a_folder_of_another_release_is_refused(tmp_path: Path, other: Source) -> None:
    build(Path(), other, tmp_path, [])
    with pytest.raises(ReleaseError, match="files of another release") as found:
        refuse_folder(tmp_path, SOURCE)
    assert other.version in str(found.value)
    assert other.revision in str(found.value)


def test_a_folder_that_no_release_wrote_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ReleaseError, match=r"no release wrote: thesis\.tex"):
        refuse_folder(tmp_path, SOURCE)


@pytest.mark.fault("A release is interrupted")
def test_a_release_that_was_interrupted_is_built_again(tmp_path: Path) -> None:
    build(Path(), SOURCE, tmp_path, [])
    (tmp_path / SUMS).unlink()
    (tmp_path / ".holdfast-1.2.3.tgz.partial").touch()
    build(Path(), SOURCE, tmp_path, [])
    assert "partial" not in (tmp_path / SUMS).read_text()


def test_many_changes_are_counted() -> None:
    changed = tuple(f"?? {n}" for n in range(8))
    with pytest.raises(ReleaseError, match="and 3 more"):
        refuse_checkout(Checkout(SOURCE, changed, ()))
