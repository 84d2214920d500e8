"""The version of the release. The root's pyproject.toml names it, and all other files repeat it.

`tools.generate` writes the repetitions, and `make check` fails if one differs. `make version
VERSION=0.2.0` sets a new version, and folds the fragments of changes/ into its section of CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

from tools.release import notes

PROJECT = Path("pyproject.toml")
MEMBERS = ("core", "operator", "sidecar", "trainer_sdk", "cli")
CHART = Path("charts/holdfast/Chart.yaml")
PAGE = Path("docs/install.md")
LOCKS = (Path("uv.lock"), Path("tests/frameworks/uv.lock"))
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
"""Three numbers mean the same to Python packages and to Helm, which disagree about all other forms."""


def parse(text: str) -> str:
    if _VERSION.fullmatch(text) is None:
        raise ValueError(
            f"version {text!r}: expected three numbers such as 0.2.0, without zeros before them"
        )
    return text


def of(root: Path) -> str:
    """Return the version that the root's pyproject.toml names."""
    return parse(tomllib.loads((root / PROJECT).read_text())["project"]["version"])


def files(root: Path) -> dict[Path, str]:
    """Return the text of each file that repeats the version, by its path from the root."""
    version = of(root)
    found = {}
    for member in MEMBERS:
        path = Path(member) / PROJECT
        found[path] = in_project((root / path).read_text(), version)
    found[CHART] = in_chart((root / CHART).read_text(), version)
    found[PAGE] = in_page((root / PAGE).read_text(), version)
    for path in LOCKS:
        found[path] = in_lock((root / path).read_text(), version)
    return found


def in_project(text: str, version: str) -> str:
    """Set the version of a member, and of the members that it requires.

    Members speak protocols with each other that may change with each release, so that a member requires
    the others in exactly its own version.
    """
    return re.sub(
        r'"(holdfast-[a-z]+(?:\[[a-z0-9,]+\])?)(?:==[^"]*)?"(?=[,\]])',
        rf'"\1=={version}"',
        in_root(text, version),
    )


def in_root(text: str, version: str) -> str:
    return re.sub(r'(?m)^version = "[^"]*"$', f'version = "{version}"', text, count=1)


def in_chart(text: str, version: str) -> str:
    return re.sub(r"(?m)^(version|appVersion): .*$", rf"\1: {version}", text)


def in_page(text: str, version: str) -> str:
    """Set the version in the names of images and files of a release."""
    return re.sub(r"(holdfast(?:/sdk:|-))\d+\.\d+\.\d+", rf"\g<1>{version}", text)


def in_lock(text: str, version: str) -> str:
    """Set the version of the workspace's packages in a uv.lock."""
    names = "core|operator|sidecar|sdk|cli|workspace"
    return re.sub(
        rf'(?m)^(name = "holdfast-(?:{names})"\nversion = )"[^"]*"$', rf'\1"{version}"', text
    )


def main(arguments: list[str] | None = None, root: Path = Path()) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", type=parse, help="for example 0.2.0")
    version: str = parser.parse_args(arguments).version
    text = (root / PROJECT).read_text()
    (root / PROJECT).write_text(in_root(text, version))
    for path, new in files(root).items():
        (root / path).write_text(new)
    notes.fold(root, version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
