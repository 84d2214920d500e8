"""MinIO as a store server for tests (see store_server)."""

from __future__ import annotations

from typing import ClassVar

from minio import MinioAdmin
from minio.credentials.providers import StaticProvider
from tests.support.servers.store_server import (
    ACCESS_KEY,
    REGION,
    SECRET_KEY,
    StoreServer,
    prefix_policy,
)

from holdfast_core.store.s3.credentials import Keys


class MinioServer(StoreServer):
    """MinIO server with one process and one directory."""

    tool: ClassVar[str] = "minio"

    def command(self) -> list[str]:
        config = str(self.data_dir.parent / "config")
        listen = ["--address", self.endpoint, "--config-dir", config]
        return ["server", "--quiet", *listen, str(self.data_dir)]

    def environment(self) -> dict[str, str]:
        return {
            "MINIO_ROOT_USER": ACCESS_KEY,
            "MINIO_ROOT_PASSWORD": SECRET_KEY,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
            "MINIO_CI_CD": "on",
        }

    def client_environment(self) -> dict[str, str]:
        """Return endpoint, region and the keys of the administrator as boto3's users set them."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": f"http://{self.endpoint}",
            "AWS_REGION": REGION,
        }

    def add_user(self, keys: Keys, prefix: str) -> None:
        self._users().add_service_account(
            access_key=keys.access_key,
            secret_key=keys.secret_key,
            policy=prefix_policy(self.bucket, prefix, {}),
        )

    def remove_user(self, keys: Keys) -> None:
        self._users().delete_service_account(keys.access_key)

    def _users(self) -> MinioAdmin:
        return MinioAdmin(
            endpoint=self.endpoint,
            credentials=StaticProvider(ACCESS_KEY, SECRET_KEY),
            secure=False,
            region=REGION,
        )
