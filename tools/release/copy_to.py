"""Copy the SDK from its image to a volume that trainers of a pod mount: `copy_to.py VOLUME`.

An init container runs this file, which therefore imports nothing but the standard library. It may run again
after it was interrupted, and over another version.
"""

import os
import shutil
import sys
from pathlib import Path

MARK = ".holdfast-sdk"
"""Written first: a folder with this file may be emptied by the next run."""


def main(source: Path, target: Path) -> str | None:
    """Copy what is beside this file. Returns an error, or None."""
    if not target.is_dir():
        return f"{target} is no folder: mount the volume there, and name its path as the argument"
    present = sorted(entry.name for entry in target.iterdir() if entry.name != "lost+found")
    if present and MARK not in present:
        return (
            f"{target} has files that are not Holdfast's ({', '.join(present[:5])}): mount an empty "
            "volume, because this program replaces all files in it"
        )
    try:
        (target / MARK).touch()
        for name in present:
            if (target / name).is_dir():
                shutil.rmtree(target / name)
        for entry in source.iterdir():
            if entry.is_dir():
                shutil.copytree(entry, target / entry.name)
    except (OSError, shutil.Error) as error:
        return (
            f"copying the SDK from {source} to {target} as user {os.getuid()} failed: {error}. The volume "
            "has to be writable for this user (securityContext.fsGroup of the pod), and large enough"
        )
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: copy_to.py VOLUME, the path of a folder in which only this program writes")
    sys.exit(main(Path(__file__).resolve().parent, Path(sys.argv[1])))
