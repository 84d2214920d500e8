"""What the sidecars of a job receive of a store of Azure or Google: its place, and keys or a token."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from tests.support.api_objects import ABSENT, azure_store_object, google_store_object

from holdfast_core.api import CheckpointStore
from holdfast_core.contract import StoreConfig
from holdfast_core.errors import ConfigError
from holdfast_core.store_url import parse_store_url
from holdfast_operator.decide.stores import probe_command
from holdfast_operator.decide.usages import location
from holdfast_operator.model.command_pods import render_command
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import place_of, store_config, store_view
from holdfast_operator.model.render import store_sources

IDENTITY = {"clientId": "client", "tenantId": "tenant"}


def test_a_store_with_keys_is_rendered_as_one_of_s3_is() -> None:
    view = store_view(CheckpointStore.from_dict(azure_store_object(prefix="a/b")))
    assert store_sources(view) == [{"secret": {"name": "store-keys"}}]
    assert StoreConfig.from_json(view.config.to_json()) == StoreConfig(
        "teamastore.blob.core.windows.net",
        True,
        "checkpoints",
        "a/b",
        "",
        account="teamastore",
    )


def test_a_web_identity_mounts_a_token_instead_of_a_secret() -> None:
    changes = {
        "credentialsSecretRef": ABSENT,
        "webIdentity": IDENTITY,
        "caSecretRef": {"name": "ca"},
    }
    view = store_view(CheckpointStore.from_dict(azure_store_object(**changes)))
    token = {
        "audience": "api://AzureADTokenExchange",
        "expirationSeconds": 3600,
        "path": "webToken",
    }
    ca = {"name": "ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    assert store_sources(view) == [{"serviceAccountToken": token}, {"secret": ca}]
    found = json.loads(view.config.to_json())
    assert (found["client_id"], found["tenant_id"]) == ("client", "tenant")


def test_two_accounts_of_one_host_are_two_places() -> None:
    stores = [
        CheckpointStore.from_dict(
            azure_store_object(account=account, endpoint="http://10.0.0.1:10000", prefix="a")
        )
        for account in ("first", "second")
    ]
    assert len({place_of(store_config(store)) for store in stores}) == 2
    assert location(stores[0]) == "http://10.0.0.1:10000/first/checkpoints/a"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("az://team/_x", "'_x' is not the name of a container"),
        ("az://teamastore", "'' is not the name of a container"),
        ("az://Team/checkpoints", "'Team' is not the name of an Azure account"),
        ("az://team.blob.core.windows.net/checkpoints", "is not the name of an Azure account"),
        ("az://team/a--b", "'a--b' is not the name of a container"),
        ("az://team/checkpoints/a b", "the prefix is 'a b'"),
        ("az://team/checkpoints?sig=x", "without . and #"),
        ("gs://", "'' is not the name of a bucket: expected 3 to 222"),
        ("gs://Team/run-7", "'Team' is not the name of a bucket: expected 3 to 222"),
        ("gs://team_runs/a b", "the prefix is 'a b'"),
        ("abfs://container/x", "expected s3://bucket/prefix, az://account/container/prefix"),
    ],
)
def test_a_url_that_is_none_of_a_store_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_store_url(text)


@pytest.mark.parametrize("text", ["az://team/checkpoints/run/7", "gs://team_runs/run/7"])
def test_a_url_is_shown_as_it_was_written(text: str) -> None:
    found = parse_store_url(f"{text}/")
    assert (found.account, found.prefix) == ("team" if text.startswith("az") else "", "run/7")
    assert str(found) == text


@pytest.mark.parametrize(
    ("changes", "google", "sources"),
    [
        ({}, "identity", []),
        (
            {"credentialsSecretRef": {"name": "store-keys"}},
            "key",
            [{"secret": {"name": "store-keys"}}],
        ),
    ],
    ids=["identity of the pods", "key"],
)
def test_a_store_of_google_mounts_its_key_or_nothing(
    changes: dict[str, Any], google: Literal["key", "identity"], sources: list[Any]
) -> None:
    store = CheckpointStore.from_dict(google_store_object(prefix="a/b", **changes))
    view = store_view(store)
    assert store_sources(view) == sources
    pod = render_command(store, probe_command(store), SidecarSettings("image:1"))["spec"]
    mounts = pod["containers"][0]["volumeMounts"]
    assert (len(pod["volumes"]), len(mounts)) == (len(sources), len(sources))
    assert StoreConfig.from_json(view.config.to_json()) == StoreConfig(
        "storage.googleapis.com", True, "checkpoints", "a/b", "", google=google
    )
