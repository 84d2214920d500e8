"""The URL by which a training script names an object store.

It is `s3://bucket/prefix`, `az://account/container/prefix`, `gs://bucket/prefix` or `file:///directory`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from holdfast_core.errors import ConfigError

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}", re.ASCII)
_CONTAINER = re.compile(r"(?=.{3,63}$)[a-z0-9]+(-[a-z0-9]+)*", re.ASCII)
_GOOGLE_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*", re.ASCII)
_MAX_PREFIX = 512
"""Characters of a prefix. A key of S3 has at most 1,024 bytes, and Holdfast's names need up to 350."""

_FORMS = (
    "s3://bucket/prefix, az://account/container/prefix, gs://bucket/prefix, or file:///directory"
)


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """Place of a store, without its endpoint and its credentials."""

    bucket: str
    """"" for a directory."""
    prefix: str
    """Beginning of all keys, without a slash at either end. Maybe empty."""
    directory: str = ""
    """Absolute path of the directory that serves as the store. "" for a bucket."""
    account: str = ""
    """Account of Azure Blob Storage, in which `bucket` is a container. "" for any other store."""
    is_google: bool = False
    """Whether `bucket` is one of Google Cloud Storage."""

    def __str__(self) -> str:
        if self.directory:
            return f"file://{self.directory}"
        place = f"az://{self.account}" if self.account else "gs:/" if self.is_google else "s3:/"
        return f"{place}/{self.bucket}/{self.prefix}".rstrip("/")


def parse_store_url(text: object) -> StoreUrl:
    """Parse the URL of a store.

    Raises:
        ConfigError: It is no URL of a store, or account, bucket or prefix have characters that they may not
            have.
    """
    if not isinstance(text, str):
        raise ConfigError(f"the store {text!r}: expected a URL such as s3://bucket/prefix")
    url = urlsplit(text.strip())
    if url.query or url.fragment:
        raise ConfigError(f"the store {text!r}: expected {_FORMS} without ? and #")
    if url.scheme == "file" and url.netloc in ("", "localhost") and url.path.startswith("/"):
        return StoreUrl("", "", unquote(url.path).rstrip("/") or "/")
    match url.scheme:
        case "s3" | "gs":
            account, bucket, prefix = "", url.netloc, url.path.strip("/")
            _expect_bucket(text, bucket, is_google=url.scheme == "gs")
        case "az":
            account = url.netloc
            bucket, _, prefix = url.path.strip("/").partition("/")
            _expect_container(text, account, bucket)
        case _:
            raise ConfigError(f"the store {text!r}: expected {_FORMS}")
    is_valid = _PREFIX.fullmatch(prefix) is not None and len(prefix) <= _MAX_PREFIX
    if prefix and (not is_valid or {".", ".."} & set(prefix.split("/"))):
        raise ConfigError(
            f"the store {text!r}: the prefix is {prefix!r}: expected at most {_MAX_PREFIX} letters, digits "
            "and the characters . _ = - between single slashes"
        )
    return StoreUrl(bucket, prefix, account=account, is_google=url.scheme == "gs")


def _expect_bucket(text: str, bucket: str, *, is_google: bool) -> None:
    """Raise ConfigError unless a bucket of this cloud may have this name."""
    pattern = _GOOGLE_BUCKET if is_google else _BUCKET
    if pattern.fullmatch(bucket) is None:
        some = "222 lower-case letters, digits, dots, hyphens and underscores"
        raise ConfigError(
            f"the store {text!r}: {bucket!r} is not the name of a bucket: expected 3 to "
            + (some if is_google else "63 lower-case letters, digits, dots and hyphens")
        )


def _expect_container(text: str, account: str, container: str) -> None:
    """Raise ConfigError unless an account and a container of Azure may have these names."""
    if _ACCOUNT.fullmatch(account) is None:
        raise ConfigError(
            f"the store {text!r}: {account!r} is not the name of an Azure account: expected "
            "az://account/container/prefix, where the account has 3 to 24 lower-case letters and digits"
        )
    if _CONTAINER.fullmatch(container) is None:
        raise ConfigError(
            f"the store {text!r}: {container!r} is not the name of a container: expected "
            "az://account/container/prefix, where the container has 3 to 63 lower-case letters, digits and "
            "single hyphens between them"
        )
