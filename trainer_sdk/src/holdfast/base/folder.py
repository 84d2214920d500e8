"""`Folder`, a folder of checkpoints with what is kept in it. A folder is a path or a file URL."""

from __future__ import annotations

import os
import re
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import unquote, urlsplit

from holdfast.base.arguments import checked_count, require_one_of
from holdfast_core.errors import ConfigError

OnDamage = Literal["older", "raise"]

_LEAST_SLOTS = (
    "slots=1 keeps one copy of the state, and slots_dir=... names a directory with more room "
    "than /dev/shm"
)
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):/")
"""It requires only one slash, because pathlib.Path collapses two slashes into one."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of checkpoints, for `Checkpointer(Folder("ckpt", keep_last=5))`.

    path: the path of the folder, or file:///path. It is created if it does not exist.
    keep_last: number of committed checkpoints to keep, at least 1.
    slots: number of slots per rank, at least 1. A slot holds a copy of the rank's state until that copy is
      written to the folder.
    slots_dir: directory on this machine for the slots, instead of /dev/shm. It needs room for `slots`
      copies of the state.
    store: URL of an object store, such as "s3://bucket/prefix", to which each committed checkpoint is
      uploaded. A run whose folder lacks the newest checkpoint restores from it. Endpoint and keys come from
      the environment, as for boto3. It needs the extra `holdfast-sdk[s3]`.
    store_keep_last: number of checkpoints to keep in `store`, at least 1.
    on_damage: what a restore does when the newest checkpoint is damaged or missing and no copy of it can be
      read. With "older" it restores the newest one that can be read, and logs which newer steps exist and
      which files are bad. With "raise" it raises CorruptionError. Use the same value on every rank.

    Raises ConfigError for an invalid argument.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    keep_last: int = 3
    slots: int = 2
    slots_dir: str | os.PathLike[str] | None = None
    store: str | None = None
    store_keep_last: int = 3
    on_damage: OnDamage = "older"

    def __post_init__(self) -> None:
        folder_path(self.path)
        checked = {
            "keep_last": checked_count(self.keep_last, "keep_last", 1, of="Folder"),
            "slots": checked_count(self.slots, "slots", 1, _LEAST_SLOTS, of="Folder"),
            "store_keep_last": checked_count(
                self.store_keep_last, "store_keep_last", 1, of="Folder"
            ),
        }
        for name, count in checked.items():
            object.__setattr__(self, name, count)
        require_one_of(self.on_damage, "on_damage", get_args(OnDamage), of="Folder")


def folder_path(dir: str | os.PathLike[str]) -> Path:
    """Return the absolute path. Raises ConfigError for anything but a path or a file URL."""
    text: object = os.fspath(dir)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"Folder({dir!r}): expected the path of a folder")
    match = _SCHEME.match(text)
    if match is None:
        return _absolute(text)
    scheme = match.group(1).lower()
    url = urlsplit(text.strip())
    if scheme == "file" and url.netloc in ("", "localhost") and url.path:
        return _absolute(unquote(url.path))
    raise ConfigError(
        f"Folder({text!r}): {scheme}:// is not supported here. A folder is on a mounted file "
        "system: a path, or file:///path. To keep checkpoints in an S3-compatible store as well, use "
        'Folder("ckpt", store="s3://bucket/prefix"). In a TrainingJob leave the folder out: its '
        "spec.checkpoint.object names the store"
    )


def _absolute(path: str) -> Path:
    """Return the absolute path. Raises ConfigError if messages between processes could not contain it."""
    found = Path(path).absolute()
    try:
        str(found).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"Folder({path!r}): expected a path that UTF-8 can encode, found the bytes "
            f"{os.fsencode(found)!r}: rename the folder"
        ) from error
    return found
