"""What passes over jobs see of a CheckpointStore. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from holdfast_core.api import CheckpointStore, StoreCondition
from holdfast_core.contract import StoreConfig
from holdfast_operator.model.job import StoreView


def store_config(store: CheckpointStore) -> StoreConfig:
    """Return the store's configuration as sidecars receive it. The CRD has validated the endpoint."""
    s3, features = store.spec.s3, store.status.features
    url = urlsplit(s3.endpoint)
    return StoreConfig(
        endpoint=url.netloc,
        secure=url.scheme == "https",
        bucket=s3.bucket,
        prefix=s3.prefix,
        region=s3.region,
        part_size_mib=s3.part_size_mib,
        max_concurrency=s3.max_concurrency,
        conditional_put=features is None or features.conditional_put is not False,
    )


def store_view(store: CheckpointStore) -> StoreView:
    s3 = store.spec.s3
    answered = store.status.observed_generation == store.generation
    condition = store.status.condition(StoreCondition.AVAILABLE)
    return StoreView(
        name=store.name,
        config=store_config(store),
        credentials_secret=s3.credentials_secret_ref.name,
        ca_secret=None if s3.ca_secret_ref is None else s3.ca_secret_ref.name,
        available=store.available if answered else None,
        message="" if condition is None else condition.message,
    )
