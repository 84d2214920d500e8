"""Azurite, the emulator of Azure Blob Storage, as a store server for tests (see store_server)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ssl
import urllib.request
from datetime import UTC, datetime, timedelta
from typing import ClassVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode

from tests.support.servers.pki import Authority
from tests.support.servers.store_server import LocalServer

from holdfast_core.contract import StoreConfig
from holdfast_core.store.cloud.azure import AzureKeys
from holdfast_core.store.cloud.keys import FixedKeys

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = base64.b64encode(b"a key of Azurite in tests".ljust(64)).decode()
_VERSION = "2023-11-03"


class AzuriteServer(LocalServer):
    """Azurite with one process, one directory and the keys that a test gives it."""

    tool: ClassVar[str] = "azurite"

    def __init__(self, *, certificates: Authority | None = None) -> None:
        """Describe the server.

        Args:
            certificates: Issuer of a certificate. With it, the server speaks TLS only and accepts tokens of
                web identities as well as keys.
        """
        super().__init__()
        self.keys = [ACCOUNT_KEY]
        """Keys of the account, at most two. Others count after the next start."""
        self._certificates = certificates

    def command(self) -> list[str]:
        host, _, port = self.endpoint.partition(":")
        where = ["--blobHost", host, "--blobPort", port, "--location", str(self.data_dir)]
        return [
            *where,
            *self._tls(),
            "--skipApiVersionCheck",
            "--disableTelemetry",
            "--silent",
        ]

    def _tls(self) -> list[str]:
        if self._certificates is None:
            return []
        folder = self.data_dir.parent
        certificate, key = self._certificates.leaf("127.0.0.1", "localhost")
        (folder / "tls.crt").write_bytes(certificate)
        (folder / "tls.key").write_bytes(key)
        (folder / "ca.crt").write_bytes(self._certificates.certificate_pem)
        files = ["--cert", str(folder / "tls.crt"), "--key", str(folder / "tls.key")]
        return [*files, "--oauth", "basic"]

    @property
    def ca_file(self) -> str | None:
        return None if self._certificates is None else str(self.data_dir.parent / "ca.crt")

    def environment(self) -> dict[str, str]:
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{':'.join(self.keys)}"}

    @property
    def credentials(self) -> FixedKeys:
        return FixedKeys(AzureKeys(account_key=self.keys[0]))

    def config(self, prefix: str = "", *, endpoint: str | None = None) -> StoreConfig:
        """Return the configuration of a store on this server, or on a proxy in front of it."""
        where = endpoint or self.endpoint
        secure = self._certificates is not None
        return StoreConfig(where, secure, self.bucket, prefix, "", account=ACCOUNT)

    def client_environment(self) -> dict[str, str]:
        """Return endpoint and key as users of Azure's tools set them."""
        return {
            "AZURE_STORAGE_ENDPOINT": f"http://{self.endpoint}",
            "AZURE_STORAGE_KEY": self.keys[0],
        }

    def sas_token(self, *, seconds: float = 3600.0) -> str:
        """Return a shared access signature with all rights, which ends in some seconds."""
        now = datetime.now(UTC)
        start, end = (
            moment.strftime("%Y-%m-%dT%H:%M:%SZ")
            for moment in (now - timedelta(hours=1), now + timedelta(seconds=seconds))
        )
        rights = {"sp": "rwdlac", "ss": "b", "srt": "sco", "st": start, "se": end}
        signed = [ACCOUNT, *(rights[name] for name in ("sp", "ss", "srt", "st", "se"))]
        text = "\n".join([*signed, "", "", _VERSION, "", ""])
        return urlencode({"sv": _VERSION, **rights, "sig": self._signature(text)})

    def create_bucket(self) -> str:
        return self.create_container(self.bucket)

    def create_container(self, name: str) -> str:
        """Create a container, without Holdfast's client. Return "", or why it was not created."""
        date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"x-ms-date": date, "x-ms-version": _VERSION}
        signed = [f"{key}:{value}" for key, value in headers.items()]
        text = "\n".join(
            ["PUT", *[""] * 11, *signed, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
        )
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{self._signature(text)}"
        headers["Content-Length"] = "0"
        scheme = "http" if self._certificates is None else "https"
        url = f"{scheme}://{self.endpoint}/{ACCOUNT}/{name}?restype=container"
        request = urllib.request.Request(url, method="PUT", headers=headers)
        trusted = ssl.create_default_context(cafile=self.ca_file)
        try:
            with urllib.request.urlopen(request, timeout=10, context=trusted):
                return ""
        except HTTPError as error:
            return "" if error.code == 409 else str(error)
        except (URLError, OSError) as error:
            return str(error)

    def _signature(self, text: str) -> str:
        key = base64.b64decode(self.keys[0])
        return base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
