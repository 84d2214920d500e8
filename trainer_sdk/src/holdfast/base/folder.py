"""Parses `Checkpointer(dir=...)`: a path or a file URL. Other URLs are not supported."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast_core.errors import ConfigError

_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):/")
"""It requires only one slash, because pathlib.Path collapses two slashes into one."""


def folder_path(dir: str | os.PathLike[str]) -> Path:
    """Return the absolute path. Raises ConfigError for anything but a path or a file URL."""
    text: object = os.fspath(dir)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"Checkpointer(dir={dir!r}): expected the path of a folder")
    match = _SCHEME.match(text)
    if match is None:
        return _absolute(text)
    scheme = match.group(1).lower()
    url = urlsplit(text.strip())
    if scheme == "file" and url.netloc in ("", "localhost") and url.path:
        return _absolute(unquote(url.path))
    raise ConfigError(
        f"Checkpointer(dir={text!r}): {scheme}:// is not supported here. dir is a folder of a mounted file "
        "system: a path, or file:///path. To keep checkpoints in an S3-compatible store as well, set dir to "
        'a folder and add store="s3://bucket/prefix". In a TrainingJob leave both out: its '
        "spec.checkpoint.object names the store"
    )


def _absolute(path: str) -> Path:
    """Return the absolute path. Raises ConfigError if messages between processes could not contain it."""
    found = Path(path).absolute()
    try:
        str(found).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"Checkpointer(dir={path!r}): expected a path that UTF-8 can encode, found the bytes "
            f"{os.fsencode(found)!r}: rename the folder"
        ) from error
    return found
