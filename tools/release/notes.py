"""The changes of a version: the fragments of changes/, which a release folds into CHANGELOG.md."""

from __future__ import annotations

from pathlib import Path

CHANGELOG = Path("CHANGELOG.md")
FRAGMENTS = Path("changes")


def changes(root: Path, version: str) -> list[str]:
    """Return one text a change: of the fragments, or of the version's section where they are folded in."""
    found = [path.read_text().strip() for path in sorted((root / FRAGMENTS).glob("*.md"))]
    return found or section((root / CHANGELOG).read_text(), version)


def section(changelog: str, version: str) -> list[str]:
    """Return the items below the version's heading."""
    lines = _split(changelog, version)[1].splitlines()
    return [line.removeprefix("* ") for line in lines if line.startswith("* ")]


def folded(changelog: str, version: str, texts: list[str]) -> str:
    """Return the changelog with these changes in the section of the version, which is the first section."""
    known = section(changelog, version)
    new = [" ".join(text.split()) for text in texts]
    items = "".join(
        f"* {text}\n" for text in [*known, *(text for text in new if text not in known)]
    )
    before, _, after = _split(changelog, version)
    head, older, rest = f"{before}{after}".partition("\n## ")
    return f"{head.rstrip()}\n\n## {version}\n\n{items}{older}{rest}"


def fold(root: Path, version: str) -> None:
    """Move the fragments into the changelog. The changelog is written before a fragment is deleted."""
    found = sorted((root / FRAGMENTS).glob("*.md"))
    changelog = root / CHANGELOG
    texts = [path.read_text() for path in found]
    changelog.write_text(folded(changelog.read_text(), version, texts))
    for path in found:
        path.unlink()


def _split(changelog: str, version: str) -> tuple[str, str, str]:
    """Return what precedes the section of the version, the section without its heading, and the rest."""
    before, found, rest = changelog.partition(f"\n## {version}\n")
    if not found:
        return changelog, "", ""
    inside, older, after = rest.partition("\n## ")
    return before, inside, f"{older}{after}"
