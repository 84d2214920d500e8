"""Opens the object store that a training script names by a URL, outside of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.probe import ProbeReport, probe
from holdfast_core.store.s3.aws import AwsCredentials, AwsSettings
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.s3.retry import Retrier, RetryPolicy
from holdfast_core.store.s3.store import S3ObjectStore
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store_url import StoreUrl

_START = RetryPolicy(max_attempts=3, budget_seconds=10.0)
"""Policy of a process that looks for its restore point. It has its own loop, which says what it waits for."""


def open_tier(
    url: StoreUrl,
    env: Mapping[str, str],
    *,
    is_quick: bool = False,
    conditional_put: bool = True,
    throttle: Callable[[int], object] | None = None,
) -> ObjectTier:
    """Open a store. No request is sent before the first call of a method.

    Args:
        url: The store.
        env: Environment variables: endpoint, region and keys as boto3 takes them.
        is_quick: Give up within seconds where the store does not answer.
        conditional_put: Whether the store respects If-None-Match.
        throttle: Receives the size of each part in bytes before it is sent, and may block.

    Raises:
        ConfigError: The endpoint or the profile is not valid. Keys are looked for at the first request.
    """
    if url.directory:
        return ObjectTier(DirectoryObjectStore(Path(url.directory)))
    settings = AwsSettings(env)
    config = settings.store_config(url, conditional_put=conditional_put)
    client = S3Client(config, AwsCredentials(settings), ca_file=settings.ca_file)
    retrier = Retrier(_START) if is_quick else Retrier()
    store = S3ObjectStore(client, retrier=retrier, throttle=throttle)
    return ObjectTier(store, config.prefix, readers=config.max_concurrency)


def probe_url(url: StoreUrl, env: Mapping[str, str]) -> ProbeReport | None:
    """Probe an S3 store before the first upload. None for a directory, which needs no probe.

    Raises ConfigError as `open_tier` does.
    """
    if url.directory:
        return None
    settings = AwsSettings(env)
    return probe(settings.store_config(url), AwsCredentials(settings), ca_file=settings.ca_file)
