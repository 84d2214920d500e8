"""Bucket, endpoint and keys of Google Cloud Storage: from a mounted Secret, or from the environment.

The key is a file of a service account, or of a person who has logged in by gcloud. Without one, obstore asks
for tokens where Google's own tools do: by the file of gcloud in the home directory, else at the metadata
server, which on GKE answers with the identity of the pod's service account.

Keys are never in a log, an error message or a repr.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from obstore.store import GCSStore

from holdfast_core.contract import StoreConfig, parse_endpoint
from holdfast_core.errors import ConfigError
from holdfast_core.store.cloud.errors import ObstoreError
from holdfast_core.store.cloud.keys import FixedKeys
from holdfast_core.store.s3.secret_files import SecretFiles
from holdfast_core.store_url import StoreUrl

KEY_FILE = "serviceAccount.json"
DEFAULT_ENDPOINT = "https://storage.googleapis.com"
_ENDPOINT_VARIABLE = "GOOGLE_BASE_URL"
_KEY_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_FIELDS = {
    "service_account": ("client_email", "private_key", "private_key_id"),
    "authorized_user": ("client_id", "client_secret", "refresh_token"),
}
"""What obstore reads of a key file, by its type."""
_OF_OBSTORE = (
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "SERVICE_ACCOUNT",
)
"""Variables that obstore reads, and that would take the place of the key or identity."""
_WRONG_KEY = re.compile(r"pem file|RSA key|service account file")


@dataclass(frozen=True, slots=True)
class GoogleKeys:
    """The key file, or an identity for which obstore asks for tokens."""

    path: str = ""
    """"": there is no key file."""
    document: str = field(default="", repr=False)
    """Its text."""

    @property
    def advice_on_tokens(self) -> str:
        """See CloudKeys."""
        if self.path:  # of a person: the key of a service account signs its tokens itself
            return (
                f"log in again (gcloud auth application-default login), and correct {self.path}, or use a "
                "key of a service account"
            )
        return (
            "where there is no metadata server, name a key of a service account (credentialsSecretRef, "
            f"{_KEY_VARIABLE}); on GKE, check that the pool of nodes has workload identity"
        )

    def secrets(self) -> tuple[str, ...]:
        """See CloudKeys."""
        found = json.loads(self.document or "{}")
        names = ("private_key", "client_secret", "refresh_token")
        return tuple(found[name] for name in names if name in found)

    def open(self, config: StoreConfig, options: dict[str, Any], retries: Any) -> GCSStore:
        """See CloudKeys."""
        scheme = "https" if config.secure else "http"
        settings: dict[str, Any] = {
            "base_url": f"{scheme}://{config.endpoint}",
            "skip_signature": False,
        }
        if self.path:
            settings["application_credentials"] = self.path
        given: Any = settings
        try:
            return GCSStore(
                config.bucket,
                config=given,
                client_options=cast("Any", options),
                retry_config=retries,
            )
        except ObstoreError as error:
            if _WRONG_KEY.search(str(error)) is None:
                raise
            # The text of the cause may have a part of the key.
            raise ConfigError(
                f"the key in {self.path} cannot be used: its private_key is none of RSA in PEM"
            ) from None


class GoogleFile(SecretFiles[GoogleKeys]):
    """The key from the file serviceAccount.json of a directory."""

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory) / KEY_FILE
        super().__init__(
            directory,
            (KEY_FILE,),
            lambda texts: (
                _keys(str(path), texts[KEY_FILE], "the Secret of the CheckpointStore")
                if texts[KEY_FILE]
                else None
            ),
            f"a file {KEY_FILE}",
            is_document=True,
        )


@dataclass(frozen=True, slots=True)
class GoogleSettings:
    """The part of an environment that names endpoint and key.

    Args:
        env: Environment variables, with the names that Google's own tools and obstore use.
    """

    env: Mapping[str, str]

    @property
    def ca_file(self) -> str | None:
        """The file of CA certificates, or None for those of the system."""
        return self.env.get("SSL_CERT_FILE") or None

    def store_config(self, url: StoreUrl) -> StoreConfig:
        """Return the configuration of a bucket. Raises ConfigError for an invalid endpoint."""
        endpoint = self.env.get(_ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
        host, secure = parse_endpoint(endpoint, f"; correct {_ENDPOINT_VARIABLE}")
        return StoreConfig(host, secure, url.bucket, url.prefix, "", google="key")

    def credentials(self) -> FixedKeys:
        """Return the key that the environment names. Raises ConfigError for one that cannot be used."""
        if others := [name for name in _OF_OBSTORE if self.env.get(name)]:
            raise ConfigError(
                f"unset {' and '.join(others)}: the key of a store of Google is named by {_KEY_VARIABLE}"
            )
        path = self.env.get(_KEY_VARIABLE) or ""
        if not path:
            return FixedKeys(GoogleKeys())
        where = f"{_KEY_VARIABLE}={path}"
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{where}: {getattr(error, 'strerror', None) or 'not a text'}"
            ) from error
        return FixedKeys(_keys(path, text, where))


def _keys(path: str, text: str, where: str) -> GoogleKeys:
    """Return the key of a file. Raises ConfigError for what is none; its texts show nothing of it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: the key is not JSON") from None
    kind = found.get("type") if isinstance(found, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ConfigError(
            f"{where}: expected the type {' or '.join(_FIELDS)}, found {str(kind)[:40]!r}: download a "
            "key of a service account, or leave the file out and use the identity of the pods"
        )
    missing = [name for name in _FIELDS[kind] if not isinstance(found.get(name), str)]
    if missing:
        raise ConfigError(f"{where}: the key lacks {', '.join(missing)}: download it again")
    return GoogleKeys(path, text)
