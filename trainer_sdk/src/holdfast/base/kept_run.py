"""The identity of a training in a folder, by which experiment trackers continue the same run.

It is a file `run-id` of 16 to 32 hexadecimal digits. The first run of a folder creates it, and later ones
read it. It appears atomically and only if there is none, so that two runs which start at the same moment use
the same one. A folder with an object store uses the same identity as the store, which knows its training by
it. So a folder that is lost gets its identity back from the store.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from pathlib import Path

from holdfast_core.errors import CorruptionError, HoldfastError, UnreadableError
from holdfast_core.node.documents import read_document
from holdfast_core.node.files import (
    TEMP_PREFIX,
    DurableDirectories,
    TempFile,
    disk_errors,
    fsync_directory,
    open_to_read,
    remove_dead_temp,
    write_at,
)

_NAME = "run-id"
_OF_STORE = Path("store", "training")
"""Where a persister records the training of the folder's object store."""
_ID = re.compile(r"[0-9a-f]{16,32}", re.ASCII)
_MAX_BYTES = 64


def kept_run_id(root: Path, *, read_only: bool) -> str | None:
    """Return the identity. Create it if there is none. It is durable when this returns.

    Args:
        root: The folder.
        read_only: Create nothing, and return None if there is none.

    Raises:
        CorruptionError: The file is damaged.
        HoldfastError: The folder cannot be read or written.
    """
    path = root / _NAME
    with disk_errors(f"reading {path}"):
        found = _read(path)
        if read_only:
            return found
        if found is not None:
            fsync_directory(root)  # its creator may have died before it made the name durable
            return found
    with disk_errors(f"creating {path}"):
        for left in root.glob(f"{TEMP_PREFIX}*"):
            with suppress(OSError, UnreadableError):
                remove_dead_temp(left)
        temp = TempFile.create(root, DurableDirectories(root))
        try:
            created = _of_store(root) or secrets.token_hex(16)
            write_at(temp.fd, memoryview(f"{created}\n".encode()), 0)
            temp.sync()
            if temp.publish_if_absent(path):
                return created
        finally:
            temp.discard()
    return kept_run_id(root, read_only=read_only)  # another run has created it meanwhile


def _read(path: Path) -> str | None:
    try:
        with open(open_to_read(path), "rb") as file:
            data = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    text = data.decode("latin-1")
    if not text.endswith("\n") or _ID.fullmatch(text[:-1]) is None:
        raise CorruptionError(
            f"{path}: expected 16 to 32 hexadecimal digits and a newline, found {data!r}: write the "
            "identity of the run into it again, or delete it to begin a new run in the tracker"
        )
    return text[:-1]


def _of_store(root: Path) -> str | None:
    try:
        text = read_document(root / _OF_STORE).decode()
    except (HoldfastError, UnicodeDecodeError):
        return None
    return text if _ID.fullmatch(text) else None
