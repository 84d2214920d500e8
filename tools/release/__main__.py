"""Build a release into dist/: `python -m tools.release [PART...]`, by default all parts."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

from tools.release import archive, chart, images, krew, source, wheels
from tools.release.source import RECORD, SUMS, ReleaseError, Source

ROOT = Path(__file__).resolve().parents[2]
Part = Callable[[Path, Source, Path], None]
PARTS: dict[str, Part] = {
    "wheels": wheels.build,
    "chart": chart.build,
    "plugin": krew.build,
    "images": images.build,
}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--out", type=Path, default=root / "dist", help="default: dist/")
    options = parser.parse_args(arguments)
    try:
        checkout = source.read_checkout(root)
        source.refuse_checkout(checkout)
        build(root, checkout.source, options.out, options.parts or list(PARTS))
    except ReleaseError as error:
        print(f"the release was not built: {error}", file=sys.stderr)
        return 1
    return 0


def build(root: Path, of: Source, out: Path, parts: list[str]) -> None:
    """Write these parts of a release, then the digests of all files in `out`."""
    source.refuse_folder(out, of)
    out.mkdir(parents=True, exist_ok=True)
    (out / SUMS).unlink(missing_ok=True)
    archive.write(out / RECORD, of.record().encode())
    for part in parts:
        PARTS[part](root, of, out)
    archive.write(out / SUMS, sums(out).encode())


def sums(out: Path) -> str:
    """Return the lines that `sha256sum --check` reads, one for each file of the release."""
    files = sorted(p for p in out.glob("[!.]*") if p.is_file() and p.name != SUMS)
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files
    )


if __name__ == "__main__":
    sys.exit(main())
