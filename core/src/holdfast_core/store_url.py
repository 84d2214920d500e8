"""The URL by which a training script names an object store: `s3://bucket/prefix` or `file:///directory`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from holdfast_core.errors import ConfigError

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*", re.ASCII)
_MAX_PREFIX = 512
"""Characters of a prefix. A key of S3 has at most 1,024 bytes, and Holdfast's names need up to 350."""


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """Place of a store, without its endpoint and its credentials."""

    bucket: str
    """"" for a directory."""
    prefix: str
    """Beginning of all keys, without a slash at either end. Maybe empty."""
    directory: str = ""
    """Absolute path of the directory that serves as the store. "" for a bucket."""

    def __str__(self) -> str:
        if self.directory:
            return f"file://{self.directory}"
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def parse_store_url(text: object) -> StoreUrl:
    """Parse the URL of a store.

    Raises:
        ConfigError: It is not an S3 or file URL, or its bucket or prefix has characters that keys may not
            have.
    """
    if not isinstance(text, str):
        raise ConfigError(f"the store {text!r}: expected a URL such as s3://bucket/prefix")
    url = urlsplit(text.strip())
    if url.query or url.fragment:
        raise ConfigError(f"the store {text!r}: expected s3://bucket/prefix without ? and #")
    if url.scheme == "file" and url.netloc in ("", "localhost") and url.path.startswith("/"):
        return StoreUrl("", "", unquote(url.path).rstrip("/") or "/")
    if url.scheme != "s3":
        raise ConfigError(
            f"the store {text!r}: expected s3://bucket/prefix, or file:///path of a directory"
        )
    prefix = url.path.strip("/")
    if _BUCKET.fullmatch(url.netloc) is None:
        raise ConfigError(
            f"the store {text!r}: {url.netloc!r} is not the name of a bucket: expected 3 to 63 lower-case "
            "letters, digits, dots and hyphens"
        )
    is_valid = _PREFIX.fullmatch(prefix) is not None and len(prefix) <= _MAX_PREFIX
    if prefix and (not is_valid or {".", ".."} & set(prefix.split("/"))):
        raise ConfigError(
            f"the store {text!r}: the prefix is {prefix!r}: expected at most {_MAX_PREFIX} letters, digits "
            "and the characters . _ = - between single slashes"
        )
    return StoreUrl(url.netloc, prefix)
