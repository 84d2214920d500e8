"""Endpoint, region and keys of an S3 store: from a mounted Secret, or as boto3's users set them.

Keys are never in a log, an error message or a repr.

Outside of a cluster keys are taken from the first of these places that has them:

1. AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN;
2. a web identity: AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN, or the profile's;
3. the keys of the profile, in the shared credentials file or in the configuration file;
4. the container's credentials (AWS_CONTAINER_CREDENTIALS_RELATIVE_URI or _FULL_URI);
5. the machine's instance metadata.

A profile that needs `aws sso login`, `source_profile` or `credential_process` is refused with the command
that exports its keys.
"""

from __future__ import annotations

import configparser
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from minio.credentials.credentials import Credentials
from minio.credentials.providers import IamAwsProvider, WebIdentityProvider
from urllib3 import PoolManager, Retry, Timeout
from urllib3.exceptions import HTTPError

from holdfast_core.contract import StoreConfig, parse_endpoint
from holdfast_core.errors import ConfigError, UnavailableError
from holdfast_core.store.s3.secret_files import SecretFiles
from holdfast_core.store_url import StoreUrl

ACCESS_KEY_FILE = "accessKey"
SECRET_KEY_FILE = "secretKey"
SESSION_TOKEN_FILE = "sessionToken"


@dataclass(frozen=True, slots=True)
class Keys:
    """One consistent set of credentials."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)

    def for_signer(self) -> Credentials:
        return Credentials(self.access_key, self.secret_key, self.session_token)

    def secrets(self) -> tuple[str, ...]:
        """Return the strings that must never appear in a log, a condition or an error."""
        return tuple(s for s in (self.access_key, self.secret_key, self.session_token) if s)


class CredentialsProvider(Protocol):
    """Source of a client's keys. Safe for use by many threads."""

    def retrieve(self) -> Keys:
        """Return the current keys, possibly from a cache. Raises ConfigError."""
        ...

    def refresh(self) -> Keys:
        """Return the current keys without the cache. The client calls it when the store refused a key.

        Raises ConfigError.
        """
        ...


class FileCredentials(SecretFiles[Keys]):
    """Credentials from the files accessKey, secretKey and, if present, sessionToken of a directory."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__(
            directory,
            (ACCESS_KEY_FILE, SECRET_KEY_FILE, SESSION_TOKEN_FILE),
            _keys_of_files,
            f"files {ACCESS_KEY_FILE} and {SECRET_KEY_FILE} with one key each",
        )


def _keys_of_files(texts: Mapping[str, str]) -> Keys | None:
    access, secret = texts[ACCESS_KEY_FILE], texts[SECRET_KEY_FILE]
    if not access or not secret:
        return None
    return Keys(access, secret, texts[SESSION_TOKEN_FILE] or None)


_DEFAULT_REGION = "us-east-1"
_TIMEOUT = Timeout(connect=2.0, read=10.0)
_UNSUPPORTED = ("sso_session", "sso_start_url", "source_profile", "credential_process")


@dataclass(frozen=True, slots=True)
class AwsSettings:
    """The part of an environment that names endpoint, region and keys. Files are read when they are needed.

    Args:
        env: Environment variables, with the names that boto3 uses.
    """

    env: Mapping[str, str]

    @property
    def profile_name(self) -> str:
        return self.env.get("AWS_PROFILE") or self.env.get("AWS_DEFAULT_PROFILE") or "default"

    @property
    def credentials_file(self) -> Path:
        return self._file("AWS_SHARED_CREDENTIALS_FILE", "credentials")

    @property
    def config_file(self) -> Path:
        return self._file("AWS_CONFIG_FILE", "config")

    @property
    def ca_file(self) -> str | None:
        """The file of CA certificates, or None for those of the system."""
        return self.env.get("AWS_CA_BUNDLE") or self.profile().get("ca_bundle") or None

    def profile(self) -> dict[str, str]:
        """Return the values of the profile in both files.

        Raises:
            ConfigError: A file cannot be parsed, or AWS_PROFILE names a profile that no file has.
        """
        name = self.profile_name
        section = name if name == "default" else f"profile {name}"
        config = _section(self.config_file, section)
        keys = _section(self.credentials_file, name)
        if config is None and keys is None and name != "default":
            raise ConfigError(
                f"AWS_PROFILE={name}: neither {self.credentials_file} nor {self.config_file} has this "
                "profile; correct the name, or unset AWS_PROFILE"
            )
        return {**(config or {}), **(keys or {})}

    def store_config(self, url: StoreUrl, *, conditional_put: bool = True) -> StoreConfig:
        """Return the configuration of a bucket. Raises ConfigError for an invalid endpoint."""
        profile = self.profile()
        region = (
            self.env.get("AWS_REGION")
            or self.env.get("AWS_DEFAULT_REGION")
            or profile.get("region")
            or _DEFAULT_REGION
        )
        endpoint = (
            self.env.get("AWS_ENDPOINT_URL_S3")
            or self.env.get("AWS_ENDPOINT_URL")
            or profile.get("endpoint_url")
            or f"https://s3.{region}.amazonaws.com{_suffix(region)}"
        )
        host, secure = parse_endpoint(
            endpoint,
            "; correct AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or endpoint_url of the profile",
        )
        return StoreConfig(
            endpoint=host,
            secure=secure,
            bucket=url.bucket,
            prefix=url.prefix,
            region=region,
            conditional_put=conditional_put,
        )

    def _file(self, variable: str, name: str) -> Path:
        given = self.env.get(variable)
        if given:
            return Path(given).expanduser()
        home = self.env.get("HOME")
        return (Path(home) if home else Path.home()) / ".aws" / name


class AwsCredentials:
    """Keys from the first place that has them. Safe for use by many threads.

    They are kept until they expire, or until the store refuses them.
    """

    def __init__(self, settings: AwsSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._current: Credentials | None = None

    def retrieve(self) -> Keys:
        """See CredentialsProvider. Raises UnavailableError where the service that issues keys fails."""
        with self._lock:
            if self._current is None or self._current.is_expired():
                self._current = self._load()
            return _keys(self._current)

    def refresh(self) -> Keys:
        """See CredentialsProvider. Raises UnavailableError where the service that issues keys fails."""
        with self._lock:
            self._current = self._load()
            return _keys(self._current)

    def _load(self) -> Credentials:
        env = self._settings.env
        access, secret = env.get("AWS_ACCESS_KEY_ID"), env.get("AWS_SECRET_ACCESS_KEY")
        if access or secret:
            if not (access and secret):
                raise ConfigError(
                    "only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set: set both"
                )
            return Credentials(access, secret, env.get("AWS_SESSION_TOKEN") or None)
        profile = self._settings.profile()
        token_file = env.get("AWS_WEB_IDENTITY_TOKEN_FILE") or profile.get(
            "web_identity_token_file"
        )
        if token_file:
            return self._web_identity(Path(token_file).expanduser(), profile)
        if profile.get("aws_access_key_id") and profile.get("aws_secret_access_key"):
            return Credentials(
                profile["aws_access_key_id"],
                profile["aws_secret_access_key"],
                profile.get("aws_session_token") or None,
            )
        unsupported = [name for name in _UNSUPPORTED if profile.get(name)]
        if unsupported:
            name = self._settings.profile_name
            raise ConfigError(
                f"the AWS profile {name!r} uses {unsupported[0]}, which Holdfast does not support: export "
                f'its keys first: eval "$(aws configure export-credentials --profile {name} --format env)"'
            )
        return self._from_service()

    def _web_identity(self, token_file: Path, profile: Mapping[str, str]) -> Credentials:
        """Exchange the token of a web identity for keys of its role."""
        env = self._settings.env
        region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or profile.get("region")
        regional = f"sts.{region}.amazonaws.com{_suffix(region)}" if region else "sts.amazonaws.com"
        provider = WebIdentityProvider(
            jwt_provider_func=lambda: {"access_token": _token(token_file), "expires_in": "0"},
            sts_endpoint=env.get("AWS_ENDPOINT_URL_STS") or f"https://{regional}",
            role_arn=env.get("AWS_ROLE_ARN") or profile.get("role_arn"),
            role_session_name=env.get("AWS_ROLE_SESSION_NAME") or "holdfast",
            http_client=self._http(retries=2),
        )
        return _called("keys of the web identity (AWS_WEB_IDENTITY_TOKEN_FILE)", provider.retrieve)

    def _from_service(self) -> Credentials:
        """Request keys from the container's agent or from the instance metadata."""
        env = self._settings.env
        relative = env.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
        full = env.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
        if relative or full:
            provider = IamAwsProvider(http_client=self._http(retries=2))
            return _called("keys of the container (AWS_CONTAINER_CREDENTIALS_*)", provider.retrieve)
        error: Exception | str = "AWS_EC2_METADATA_DISABLED is set"
        if env.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
            try:
                return IamAwsProvider(http_client=self._http(retries=0)).retrieve()
            except (HTTPError, ValueError, KeyError, OSError) as failed:
                error = failed
        raise ConfigError(
            "no keys for the object store: AWS_ACCESS_KEY_ID and AWS_WEB_IDENTITY_TOKEN_FILE are not set, "
            f"the profile {self._settings.profile_name!r} has no keys in {self._settings.credentials_file} "
            f"or {self._settings.config_file}, there are no AWS_CONTAINER_CREDENTIALS_*, and the instance "
            f"metadata gives none ({type(error).__name__ if isinstance(error, Exception) else error}); set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )

    def _http(self, retries: int) -> PoolManager:
        return PoolManager(
            timeout=_TIMEOUT,
            retries=Retry(
                total=retries, backoff_factor=0.2, status_forcelist=[429, 500, 502, 503, 504]
            ),
            ca_certs=self._settings.ca_file,
        )


def _called(what: str, retrieve: Callable[[], Credentials]) -> Credentials:
    try:
        return retrieve()
    except HTTPError as error:
        # The text of an HTTP error has the URL, which holds the token of a web identity.
        raise UnavailableError(
            f"{what}: the service did not answer: {type(error).__name__}"
        ) from None
    except (ValueError, KeyError, AttributeError) as error:
        status = str(error).rpartition("HTTP status code ")[2]
        if status.isdigit() and (int(status) == 429 or int(status) >= 500):
            raise UnavailableError(f"{what}: the service failed with status {status}") from None
        reason = f"status {status}" if status.isdigit() else "its reply has no keys"
        raise ConfigError(
            f"{what}: the service refused: {reason}; check the role and the token"
        ) from None


def _token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the token of the web identity in {path} cannot be read: {type(error).__name__}"
        ) from error


def _keys(credentials: Credentials) -> Keys:
    keys = Keys(credentials.access_key, credentials.secret_key, credentials.session_token)
    for text in keys.secrets():
        if not (text.isascii() and text.isprintable()) or " " in text:
            raise ConfigError(
                "the keys of the object store: expected printable ASCII characters without spaces; "
                "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the profile"
            )
    return keys


def _section(path: Path, name: str) -> dict[str, str] | None:
    """Return the values of a section, or None where the file or the section does not exist."""
    parser = configparser.RawConfigParser()
    try:
        text = path.read_text()
        parser.read_string(text, str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}") from None
    return dict(parser.items(name)) if parser.has_section(name) else None


def _suffix(region: str) -> str:
    return ".cn" if region.startswith("cn-") else ""
