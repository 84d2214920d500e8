"""Endpoint, region and keys come from where boto3 takes them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from holdfast_core.errors import ConfigError, UnavailableError
from holdfast_core.store.s3.credentials import AwsCredentials, AwsSettings, Keys
from holdfast_core.store_url import StoreUrl, parse_store_url

URL = StoreUrl("bucket", "a/b")
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}


def settings(tmp_path: Path, **env: str) -> AwsSettings:
    return AwsSettings({"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true", **env})


def keys(tmp_path: Path, **env: str) -> Keys:
    return AwsCredentials(settings(tmp_path, **env)).retrieve()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("env", "endpoint", "secure", "region"),
    [
        pytest.param({}, "s3.us-east-1.amazonaws.com", True, "us-east-1", id="default"),
        pytest.param(
            {"AWS_REGION": "eu-west-1"},
            "s3.eu-west-1.amazonaws.com",
            True,
            "eu-west-1",
            id="region",
        ),
        pytest.param(
            {"AWS_DEFAULT_REGION": "cn-north-1"},
            "s3.cn-north-1.amazonaws.com.cn",
            True,
            "cn-north-1",
            id="china",
        ),
        pytest.param(
            {"AWS_ENDPOINT_URL": "http://minio:9000/"}, "minio:9000", False, "us-east-1", id="url"
        ),
        pytest.param(
            {"AWS_ENDPOINT_URL": "http://other", "AWS_ENDPOINT_URL_S3": "https://s3.example.org"},
            "s3.example.org",
            True,
            "us-east-1",
            id="url of S3",
        ),
    ],
)
def test_endpoint_and_region_come_from_the_environment(
    tmp_path: Path, env: dict[str, str], endpoint: str, secure: bool, region: str
) -> None:
    config = settings(tmp_path, **env).store_config(URL)
    found = (config.endpoint, config.secure, config.region, config.bucket, config.prefix)
    assert found == (endpoint, secure, region, "bucket", "a/b")


@pytest.mark.parametrize("endpoint", ["minio:9000", "ftp://x", "http://x/path", "http://user@x"])
def test_an_invalid_endpoint_is_refused(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL"):
        settings(tmp_path, AWS_ENDPOINT_URL=endpoint).store_config(URL)


def test_keys_come_from_the_environment_before_the_profile(tmp_path: Path) -> None:
    write(
        tmp_path / ".aws/credentials",
        "[default]\naws_access_key_id = p\naws_secret_access_key = %s\n",
    )
    assert keys(tmp_path) == Keys("p", "%s")
    assert keys(tmp_path, **KEYS, AWS_SESSION_TOKEN="t") == Keys("id", "secret", "t")


def test_a_profile_is_read_from_both_files(tmp_path: Path) -> None:
    write(
        tmp_path / ".aws/config",
        "[profile work]\nregion = eu-central-1\nendpoint_url = http://minio:9000\nca_bundle = /ca.pem\n"
        "aws_access_key_id = c\naws_secret_access_key = d\n",
    )
    assert keys(tmp_path, AWS_PROFILE="work") == Keys("c", "d")
    write(
        tmp_path / ".aws/credentials",
        "[work]\naws_access_key_id = a\naws_secret_access_key = b\n",
    )
    assert keys(tmp_path, AWS_PROFILE="work") == Keys("a", "b")
    found = settings(tmp_path, AWS_PROFILE="work")
    config = found.store_config(URL)
    assert (config.region, config.endpoint) == ("eu-central-1", "minio:9000")
    assert found.ca_file == "/ca.pem"


def test_keys_that_were_replaced_in_the_profile_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / ".aws/credentials"
    write(path, "[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    credentials = AwsCredentials(settings(tmp_path))
    assert credentials.retrieve() == Keys("a", "b")
    write(path, "[default]\naws_access_key_id = c\naws_secret_access_key = d\n")
    assert credentials.refresh() == Keys("c", "d")


@pytest.mark.parametrize(
    ("env", "config", "match"),
    [
        pytest.param({}, "", "no keys for the object store: .*credentials", id="none"),
        pytest.param({"AWS_ACCESS_KEY_ID": "x"}, "", "set both", id="half"),
        pytest.param({"AWS_PROFILE": "x"}, "", "neither .* has this profile", id="profile"),
        pytest.param(
            {"AWS_PROFILE": "x"},
            "[profile x]\nsso_session = y\n",
            "aws configure export-credentials --profile x",
            id="sso",
        ),
        pytest.param({}, "[default\n", "config cannot be read", id="not a file of AWS"),
        pytest.param(
            {**KEYS, "AWS_SECRET_ACCESS_KEY": "a b"}, "", "without spaces", id="a key with a space"
        ),
    ],
)
def test_missing_or_invalid_keys_are_an_error_that_says_what_to_do(
    tmp_path: Path, env: dict[str, str], config: str, match: str
) -> None:
    if config:
        write(tmp_path / ".aws/config", config)
    with pytest.raises(ConfigError, match=match) as raised:
        keys(tmp_path, **env)
    assert "a b" not in str(raised.value)


class Issuer:
    """A service that issues keys, and records the requests."""

    def __init__(self) -> None:
        self.status = 200
        self.seen: list[tuple[str, dict[str, list[str]], str | None]] = []
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.reply()

            def do_GET(self) -> None:
                self.reply()

            def reply(self) -> None:
                parts = urlsplit(self.path)
                header = self.headers.get("Authorization")
                issuer.seen.append((parts.path, parse_qs(parts.query), header))
                body = issuer.body(self.command)
                self.send_response(issuer.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def body(self, method: str) -> bytes:
        expires = "2036-01-01T00:00:00Z"
        if method == "GET":
            names = {"AccessKeyId": "cid", "SecretAccessKey": "csecret", "Token": "ctoken"}
            return json.dumps({**names, "Expiration": expires}).encode()
        return (
            '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            "<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>wid</AccessKeyId>"
            "<SecretAccessKey>wsecret</SecretAccessKey><SessionToken>wtoken</SessionToken>"
            f"<Expiration>{expires}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>"
            "</AssumeRoleWithWebIdentityResponse>"
        ).encode()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    yield issuer
    issuer.server.shutdown()
    issuer.server.server_close()


def identity(tmp_path: Path, issuer: Issuer) -> AwsCredentials:
    write(tmp_path / "token", "a-jwt\n")
    env = {
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/x",
        "AWS_ENDPOINT_URL_STS": issuer.url,
    }
    return AwsCredentials(settings(tmp_path, **env))


def test_a_web_identity_is_exchanged_for_keys_until_they_expire(
    tmp_path: Path, issuer: Issuer
) -> None:
    credentials = identity(tmp_path, issuer)
    for _ in range(2):
        assert credentials.retrieve() == Keys("wid", "wsecret", "wtoken")
    ((_, query, _),) = issuer.seen
    assert query["WebIdentityToken"] == ["a-jwt"]
    assert query["RoleArn"] == ["arn:aws:iam::1:role/x"]
    credentials.refresh()
    assert len(issuer.seen) == 2


@pytest.mark.parametrize(("status", "kind"), [(403, ConfigError), (503, UnavailableError)])
def test_an_error_of_the_service_does_not_show_the_token(
    tmp_path: Path, issuer: Issuer, status: int, kind: type[Exception]
) -> None:
    issuer.status = status
    with pytest.raises(kind) as raised:
        identity(tmp_path, issuer).retrieve()
    assert "a-jwt" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_keys_of_a_container_come_from_its_agent(
    tmp_path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{issuer.url}/keys",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": "agent-token",
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)  # minio's provider reads the environment of the process
    assert keys(tmp_path, **env) == Keys("cid", "csecret", "ctoken")
    assert [(path, header) for path, _, header in issuer.seen] == [("/keys", "agent-token")]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://my-bucket.x/a/b/", "s3://my-bucket.x/a/b"),
        ("file:///mnt/x/", "file:///mnt/x"),
    ],
)
def test_a_url_of_a_store_is_parsed(text: str, shown: str) -> None:
    assert str(parse_store_url(text)) == shown
