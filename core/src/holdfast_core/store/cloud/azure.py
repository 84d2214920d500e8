"""Account, endpoint and keys of Azure Blob Storage: from a mounted Secret, or from the environment.

Outside of a cluster keys are taken from the first of these places that has them:

1. AZURE_STORAGE_SAS_TOKEN, a shared access signature;
2. AZURE_STORAGE_KEY, or AZURE_STORAGE_ACCOUNT_KEY, a key of the account;
3. a web identity: AZURE_FEDERATED_TOKEN_FILE, AZURE_CLIENT_ID and AZURE_TENANT_ID, which the webhook of AKS
   sets, and AZURE_AUTHORITY_HOST if the cloud is not Azure's public one.

Keys are never in a log, an error message or a repr.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from obstore.store import AzureStore

from holdfast_core.contract import StoreConfig, parse_endpoint
from holdfast_core.errors import ConfigError
from holdfast_core.store.cloud.keys import FixedKeys
from holdfast_core.store.s3.secret_files import SecretFiles
from holdfast_core.store_url import StoreUrl

ACCOUNT_KEY_FILE = "accountKey"
SAS_TOKEN_FILE = "sasToken"
AUTHORITY = "https://login.microsoftonline.com"
"""Issuer of tokens of Azure's public cloud."""
_WEB_IDENTITY = ("AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_ID", "AZURE_TENANT_ID")


@dataclass(frozen=True, slots=True)
class WebIdentity:
    """A token of Kubernetes that Microsoft Entra exchanges for one of the store."""

    token_file: str
    """Is read at each exchange, because the kubelet replaces the token."""
    client_id: str
    tenant_id: str
    authority: str = AUTHORITY


@dataclass(frozen=True, slots=True)
class AzureKeys:
    """One consistent set of credentials, of which one kind is given."""

    account_key: str = field(default="", repr=False)
    sas_token: str = field(default="", repr=False)
    identity: WebIdentity | None = None

    @property
    def advice_on_tokens(self) -> str:
        """See CloudKeys."""
        return "check client id, tenant id and the federated credential, with its issuer and service account"

    def secrets(self) -> tuple[str, ...]:
        """Return the strings that must never appear in a log, a condition or an error."""
        return tuple(text for text in (self.account_key, self.sas_token) if text)

    def open(self, config: StoreConfig, options: dict[str, Any], retries: Any) -> AzureStore:
        """See CloudKeys."""
        identity = self.identity
        if identity is not None and identity.authority.startswith("http://"):
            options = {**options, "allow_http": True}
        # obstore reads the environment for all settings that are not given.
        settings: dict[str, Any] = {
            "account_name": config.account,
            "endpoint": account_url(config),
            "use_emulator": False,
            "use_fabric_endpoint": False,
            "skip_signature": False,
        }
        if identity is not None:
            settings |= {
                "credential_type": "workload_identity",
                "federated_token_file": identity.token_file,
                "client_id": identity.client_id,
                "tenant_id": identity.tenant_id,
                "authority_host": identity.authority,
            }
        elif self.sas_token:
            settings |= {"credential_type": "sas_token", "sas_key": self.sas_token}
        else:
            settings |= {"credential_type": "access_key", "account_key": self.account_key}
        given: Any = settings
        return AzureStore(
            config.bucket, config=given, client_options=cast("Any", options), retry_config=retries
        )


class AzureFiles(SecretFiles[AzureKeys]):
    """Keys from the file accountKey or sasToken of a directory."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__(
            directory,
            (ACCOUNT_KEY_FILE, SAS_TOKEN_FILE),
            lambda texts: _keys(
                texts[ACCOUNT_KEY_FILE], texts[SAS_TOKEN_FILE], "the Secret of the CheckpointStore"
            ),
            f"a file {ACCOUNT_KEY_FILE} or {SAS_TOKEN_FILE}",
        )


@dataclass(frozen=True, slots=True)
class AzureSettings:
    """The part of an environment that names endpoint and keys.

    Args:
        env: Environment variables, with the names that Azure's own tools use.
    """

    env: Mapping[str, str]

    @property
    def ca_file(self) -> str | None:
        """The file of CA certificates, or None for those of the system."""
        return self.env.get("SSL_CERT_FILE") or None

    def store_config(self, url: StoreUrl) -> StoreConfig:
        """Return the configuration of a container. Raises ConfigError for an invalid endpoint."""
        endpoint = self.env.get("AZURE_STORAGE_ENDPOINT") or default_endpoint(url.account)
        host, secure = parse_endpoint(
            endpoint, ", without the account as its path; correct AZURE_STORAGE_ENDPOINT"
        )
        return StoreConfig(
            endpoint=host,
            secure=secure,
            bucket=url.bucket,
            prefix=url.prefix,
            region="",
            account=url.account,
        )

    def credentials(self) -> FixedKeys:
        """Return the keys of the environment. Raises ConfigError where it has none."""
        env = self.env
        account_key = env.get("AZURE_STORAGE_KEY") or env.get("AZURE_STORAGE_ACCOUNT_KEY") or ""
        sas_token = env.get("AZURE_STORAGE_SAS_TOKEN") or ""
        if sas_token:
            account_key = ""
        if keys := _keys(account_key, sas_token, "AZURE_STORAGE_KEY and AZURE_STORAGE_SAS_TOKEN"):
            return FixedKeys(keys)
        found = {name: env.get(name) or "" for name in _WEB_IDENTITY}
        missing = [name for name, text in found.items() if not text]
        if not missing:
            token_file, client_id, tenant_id = found.values()
            authority = env.get("AZURE_AUTHORITY_HOST") or ""
            return web_identity(token_file, client_id, tenant_id, authority)
        if found["AZURE_FEDERATED_TOKEN_FILE"]:
            raise ConfigError(
                f"AZURE_FEDERATED_TOKEN_FILE is set, and {' and '.join(missing)} is not: set all of "
                f"{', '.join(_WEB_IDENTITY)}"
            )
        raise ConfigError(
            "no keys for Azure Blob Storage: set AZURE_STORAGE_KEY (a key of the account), "
            "AZURE_STORAGE_SAS_TOKEN (a shared access signature), or AZURE_FEDERATED_TOKEN_FILE with "
            "AZURE_CLIENT_ID and AZURE_TENANT_ID (a web identity)"
        )


def default_endpoint(account: str) -> str:
    """Return the URL of an account in Azure's public cloud."""
    return f"https://{account}.blob.core.windows.net"


def account_url(config: StoreConfig) -> str:
    """Return the URL of the account: its own host, or a host that has the account as its first folder.

    Emulators, and hosts that are an IP address, have several accounts. A host of one account begins with
    its name.
    """
    scheme = "https" if config.secure else "http"
    has_host = config.endpoint.startswith(f"{config.account}.")
    return f"{scheme}://{config.endpoint}" + ("" if has_host else f"/{config.account}")


def web_identity(token_file: str, client_id: str, tenant_id: str, authority: str) -> FixedKeys:
    """Return the credentials of a web identity. `authority` is "" for Azure's public cloud."""
    host = authority.rstrip("/") or AUTHORITY  # the webhook of AKS sets it with a slash at its end
    return FixedKeys(AzureKeys(identity=WebIdentity(token_file, client_id, tenant_id, host)))


def _keys(account_key: str, sas_token: str, where: str) -> AzureKeys | None:
    """Return the given key. None: there is none, or there are two. Raises ConfigError for a wrong one."""
    if bool(account_key) == bool(sas_token):
        return None
    if account_key:
        try:
            base64.b64decode(account_key, validate=True)
        except ValueError:
            # Another error would show a part of the key.
            raise ConfigError(
                f"the key of the Azure account is not Base64: check {where}"
            ) from None
        return AzureKeys(account_key=account_key)
    token = sas_token.removeprefix("?")
    if "sig=" not in token:
        raise ConfigError(f"the shared access signature has no sig=: check {where}")
    return AzureKeys(sas_token=token)
