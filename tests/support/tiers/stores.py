"""Object tiers in S3 stores, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast_core.contract import StoreConfig
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.s3.credentials import CredentialsProvider
from holdfast_core.store.s3.errors import Retrier
from holdfast_core.store.s3.http import Timeouts
from holdfast_core.store.s3.store import S3ObjectStore
from holdfast_core.store.tier import ObjectTier


def s3_store(
    config: StoreConfig,
    credentials: CredentialsProvider,
    *,
    retrier: Retrier | None = None,
    timeouts: Timeouts | None = None,
    throttle: Callable[[int], object] | None = None,
    sent: Callable[[int], object] | None = None,
) -> S3ObjectStore:
    """Return the objects of an S3 store."""
    client = S3Client(config, credentials, timeouts=timeouts, sent=sent)
    return S3ObjectStore(client, retrier=retrier, throttle=throttle)


def s3_tier(
    config: StoreConfig,
    credentials: CredentialsProvider,
    *,
    compressed: Callable[[int, int], object] = lambda before, after: None,
    **options: Any,
) -> ObjectTier:
    """Return the object tier in an S3 store, as the sidecar makes it.

    Args:
        options: Those of `s3_store`.
    """
    store = s3_store(config, credentials, **options)
    return ObjectTier(store, config.prefix, readers=config.max_concurrency, compressed=compressed)
