"""The one place that chooses the class of a store: a directory, S3, Azure or Google.

A store is named by the configuration that the operator renders into a pod, with keys in mounted files, or by
a URL, with endpoint and keys in the environment. What Azure and Google need is imported when such a store is
opened, because only the extra `cloud` installs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_core.contract import WEB_TOKEN_FILE, StoreConfig
from holdfast_core.store.directory import SCHEME, DirectoryObjectStore, directory_of
from holdfast_core.store.probe import ProbeReport, probe, probe_objects
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.s3.credentials import AwsCredentials, AwsSettings, FileCredentials
from holdfast_core.store.s3.errors import Retrier
from holdfast_core.store.s3.store import S3ObjectStore
from holdfast_core.store_url import StoreUrl
from holdfast_core.tiers.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """A store, and what this process needs to use it. No request was sent yet."""

    config: StoreConfig
    credentials: Any
    """CredentialsProvider of S3, CloudCredentials, or None for a directory."""
    ca_file: str | None = None

    @property
    def _is_over_obstore(self) -> bool:
        return bool(self.config.account or self.config.google)

    def open(
        self,
        *,
        retrier: Retrier | None = None,
        throttle: Callable[[int], object] | None = None,
        sent: Callable[[int], object] | None = None,
    ) -> ObjectStore:
        """Open the store. A new kind of store is added here.

        Args:
            retrier: Retry policy of all operations. A directory has none.
            throttle: Receives the size of each part in bytes before it is sent, and may block.
            sent: Receives the number of bytes that were handed to the network.
        """
        directory = directory_of(self.config.endpoint)
        if directory is not None:
            return DirectoryObjectStore(directory)
        if self._is_over_obstore:
            from holdfast_core.store.cloud.store import CloudObjectStore

            return CloudObjectStore(
                self.config,
                self.credentials,
                ca_file=self.ca_file,
                retrier=retrier,
                throttle=throttle,
                sent=sent,
            )
        client = S3Client(self.config, self.credentials, ca_file=self.ca_file, sent=sent)
        return S3ObjectStore(client, retrier=retrier, throttle=throttle)

    def probe(self) -> ProbeReport | None:
        """Probe the store, as `probe` does. None for a directory, which needs no probe."""
        if directory_of(self.config.endpoint) is not None:
            return None
        if self._is_over_obstore:
            return probe_objects(self.config, lambda retrier: self.open(retrier=retrier))
        return probe(self.config, self.credentials, ca_file=self.ca_file)


def access_in_pod(config: StoreConfig, store_dir: str) -> StoreAccess:
    """Return the access with the keys that the pod mounts in `store_dir`."""
    if directory_of(config.endpoint) is not None:
        return StoreAccess(config, None)
    if config.account:
        from holdfast_core.store.cloud.azure import AzureFiles, web_identity

        files = AzureFiles(store_dir)
        if not config.client_id:
            return StoreAccess(config, files, files.ca_file)
        token = str(Path(store_dir) / WEB_TOKEN_FILE)
        identity = web_identity(token, config.client_id, config.tenant_id, config.authority)
        return StoreAccess(config, identity, files.ca_file)
    if config.google:
        from holdfast_core.store.cloud.google import GoogleFile, GoogleKeys
        from holdfast_core.store.cloud.keys import FixedKeys

        file = GoogleFile(store_dir)
        keys = file if config.google == "key" else FixedKeys(GoogleKeys())
        return StoreAccess(config, keys, file.ca_file)
    credentials = FileCredentials(store_dir)
    return StoreAccess(config, credentials, credentials.ca_file)


def access_by_url(
    url: StoreUrl, env: Mapping[str, str], *, conditional_put: bool = True
) -> StoreAccess:
    """Return the access with endpoint and keys of the environment.

    Args:
        url: The store.
        env: Environment variables, with the names that the tools of the cloud use.
        conditional_put: Whether a bucket of S3 respects If-None-Match.

    Raises:
        ConfigError: The endpoint or the profile is not valid. Keys of S3 are looked for at the first
            request.
    """
    if url.directory:
        config = StoreConfig(f"{SCHEME}{url.directory}", False, "", url.prefix, "")
        return StoreAccess(config, None)
    if url.account:
        from holdfast_core.store.cloud.azure import AzureSettings

        azure = AzureSettings(env)
        return StoreAccess(azure.store_config(url), azure.credentials(), azure.ca_file)
    if url.is_google:
        from holdfast_core.store.cloud.google import GoogleSettings

        google = GoogleSettings(env)
        return StoreAccess(google.store_config(url), google.credentials(), google.ca_file)
    aws = AwsSettings(env)
    config = aws.store_config(url, conditional_put=conditional_put)
    return StoreAccess(config, AwsCredentials(aws), aws.ca_file)
