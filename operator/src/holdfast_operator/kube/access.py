"""Address of the Kubernetes API and the credentials of this process.

They come from the pod's service account or from a kubeconfig file. This module reads files and opens no
connection.
"""

from __future__ import annotations

import base64
import binascii
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from holdfast_core.errors import ConfigError
from holdfast_core.net.tls import load_leaf
from holdfast_operator.base.settings import SERVICE_ACCOUNT_DIR, Settings


@dataclass(frozen=True, slots=True)
class KubeAccess:
    """Address and credentials of the API. PEM text is kept in memory and never written to a disk."""

    server: str
    """https://host:port, without a slash at the end."""
    ca_pem: str | None = None
    """Certificate authorities of the server; None for those of the system."""
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    """File of the token, read again for each request because projected tokens rotate."""
    certificate_pem: str | None = None
    key_pem: str | None = field(default=None, repr=False)

    def current_token(self) -> str | None:
        """Return the bearer token, or None. Raises ConfigError if the token file cannot be read."""
        if self.token_file is None:
            return self.token
        try:
            return self.token_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"token file {self.token_file} cannot be read: {error}") from error

    def ssl_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.ca_pem)
        if self.certificate_pem is not None and self.key_pem is not None:
            load_leaf(context, self.certificate_pem, self.key_pem)
        return context


def load_access(settings: Settings) -> KubeAccess:
    """Return the access that the settings name. Raises ConfigError with the file and what it lacks."""
    if settings.kubeconfig is not None:
        return from_kubeconfig(Path(settings.kubeconfig))
    if settings.api_server is None:
        raise ConfigError(
            "cannot find the Kubernetes API: neither KUBECONFIG nor KUBERNETES_SERVICE_HOST is "
            "set; run in a pod with a service account, or set KUBECONFIG to a file"
        )
    return from_service_account(settings.api_server, SERVICE_ACCOUNT_DIR)


def from_service_account(server: str, directory: Path) -> KubeAccess:
    return KubeAccess(
        server=server, ca_pem=_read(directory / "ca.crt"), token_file=directory / "token"
    )


def from_kubeconfig(path: Path) -> KubeAccess:
    try:
        config = yaml.safe_load(_read(path)) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"kubeconfig {path} is not YAML: {error}") from error
    wanted = config.get("current-context")
    context = _named(path, config, "contexts", wanted, "context")
    cluster = _named(path, config, "clusters", context.get("cluster"), "cluster")
    user = _named(path, config, "users", context.get("user"), "user")
    if cluster.get("insecure-skip-tls-verify"):
        raise ConfigError(
            f"kubeconfig {path}: insecure-skip-tls-verify is not supported: set "
            "certificate-authority instead"
        )
    if "exec" in user or "auth-provider" in user:
        raise ConfigError(
            f"kubeconfig {path}: user {context.get('user')!r} logs in by a plug-in, which is not "
            "supported: use a token, a tokenFile or a client certificate"
        )
    token_file = user.get("tokenFile")
    return KubeAccess(
        server=str(cluster.get("server", "")).rstrip("/"),
        ca_pem=_pem(path, cluster, "certificate-authority"),
        token=user.get("token"),
        token_file=None if token_file is None else path.parent / str(token_file),
        certificate_pem=_pem(path, user, "client-certificate"),
        key_pem=_pem(path, user, "client-key"),
    )


def _named(
    path: Path, config: Mapping[str, Any], group: str, name: Any, inner: str
) -> Mapping[str, Any]:
    for entry in config.get(group) or []:
        if entry.get("name") == name:
            found = entry.get(inner)
            return found if isinstance(found, Mapping) else {}
    raise ConfigError(f"kubeconfig {path}: {group} has no entry named {name!r}")


def _pem(path: Path, section: Mapping[str, Any], key: str) -> str | None:
    data = section.get(f"{key}-data")
    if data is not None:
        try:
            return base64.b64decode(str(data), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"kubeconfig {path}: {key}-data is not base64: {error}") from error
    name = section.get(key)
    return None if name is None else _read(path.parent / str(name))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
