"""What is released: a version and a commit. Files that differ from the commit are refused."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tools.release import version

RECORD = "release.json"
"""Written to the folder of a release before anything else, so that parts of two commits never mix."""
SUMS = "SHA256SUMS"
"""Written last: a folder without it is not a whole release."""
_SHOWN = 5


class ReleaseError(Exception):
    """A release was not built. The message says what was found and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    version: str
    revision: str
    epoch: int
    """Time of the commit, in seconds since 1970: the only time that files of a release contain."""

    def record(self) -> str:
        return json.dumps({"version": self.version, "revision": self.revision}, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class Checkout:
    """What git says about a checkout."""

    source: Source
    changed: tuple[str, ...]
    """Lines of `git status --porcelain`."""
    tags: tuple[str, ...]
    """Tags of the commit that name a version."""


def read_checkout(root: Path) -> Checkout:
    revision, epoch = _git(root, "log", "-1", "--format=%H %ct").split()
    return Checkout(
        Source(version.of(root), revision, int(epoch)),
        tuple(_git(root, "status", "--porcelain").splitlines()),
        tuple(_git(root, "tag", "--points-at", "HEAD", "--list", "v[0-9]*").split()),
    )


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(
            f"git {words[0]} in {root}: {done.stderr.strip()}. A release is built from a checkout of git, "
            "because its commit is named in the images"
        )
    return done.stdout


def refuse_checkout(checkout: Checkout) -> None:
    """Raise a ReleaseError if the files are not those of the commit, or the commit is of another version."""
    if checkout.changed:
        shown = "; ".join(line.strip() for line in checkout.changed[:_SHOWN])
        more = len(checkout.changed) - _SHOWN
        raise ReleaseError(
            f"the checkout differs from commit {checkout.source.revision[:12]}: {shown}"
            f"{f' and {more} more' if more > 0 else ''}. Commit or remove the changes first"
        )
    expected = f"v{checkout.source.version}"
    wrong = [tag for tag in checkout.tags if tag != expected]
    if wrong:
        raise ReleaseError(
            f"the commit has the tag {', '.join(wrong)}, but pyproject.toml names version "
            f"{checkout.source.version}, whose tag is {expected}. Set the version with `make version "
            f"VERSION={wrong[0].removeprefix('v')}`, commit, and tag that commit"
        )


def refuse_folder(out: Path, source: Source) -> None:
    """Raise a ReleaseError if the folder has files of another release, or files that no release wrote."""
    names = {path.name for path in out.iterdir()} if out.is_dir() else set[str]()
    if not names:
        return
    if RECORD not in names:
        raise ReleaseError(
            f"{out} has files that no release wrote: {_some(names)}. Remove them (`make clean`), or "
            "choose another folder with --out"
        )
    found = (out / RECORD).read_text()
    if found != source.record():
        raise ReleaseError(
            f"{out} has files of another release: {_one_line(found)}, and this is "
            f"{_one_line(source.record())}. Remove them (`make clean`), or choose another folder with --out"
        )
    foreign = {name for name in names if _version_in(name) not in (None, source.version)}
    if foreign:
        raise ReleaseError(
            f"{out} has files of another version than {source.version}: {_some(foreign)}. Remove them "
            "(`make clean`), or choose another folder with --out"
        )


def _some(names: Collection[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(sorted(names)[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _one_line(record: str) -> str:
    return " ".join(record.split())[:200]


def _version_in(name: str) -> str | None:
    found = re.search(r"-(\d+\.\d+\.\d+)(?=[-.])", name)
    return found.group(1) if found else None
