"""VersityGW with its posix backend as a store server for tests (see store_server)."""

from __future__ import annotations

import json
import subprocess
from typing import ClassVar

from tests.support.servers.settings import find_tool
from tests.support.servers.store_server import (
    ACCESS_KEY,
    REGION,
    SECRET_KEY,
    ServerUnavailableError,
    StoreServer,
    prefix_policy,
)

from holdfast_core.store.s3.credentials import Keys


class VersitygwServer(StoreServer):
    """VersityGW server with one process.

    Objects are files, and the directory must support extended attributes.
    """

    tool: ClassVar[str] = "versitygw"

    def command(self) -> list[str]:
        users = self.data_dir.parent / "users"
        users.mkdir(exist_ok=True)
        # Without --keep-alive the server closes the connection after each reply.
        listen = ["--port", self.endpoint, "--region", REGION, "--keep-alive", "--quiet"]
        return [
            *listen,
            "--iam-dir",
            str(users),
            "--iam-cache-disable",
            "posix",
            str(self.data_dir),
        ]

    def environment(self) -> dict[str, str]:
        return {"ROOT_ACCESS_KEY_ID": ACCESS_KEY, "ROOT_SECRET_ACCESS_KEY": SECRET_KEY}

    def add_user(self, keys: Keys, prefix: str) -> None:
        """Grant `keys` the rights below `prefix`.

        A bucket has one policy here, so only the newest user has rights.
        """
        secret = ["--secret", keys.secret_key, "--role", "user"]
        self._administer("create-user", "--access", keys.access_key, *secret)
        policy = prefix_policy(self.bucket, prefix, {"Principal": {"AWS": [keys.access_key]}})
        self.admin().set_bucket_policy(self.bucket, json.dumps(policy))

    def remove_user(self, keys: Keys) -> None:
        self._administer("delete-user", "--access", keys.access_key)

    def _administer(self, *arguments: str) -> None:
        account = ["--access", ACCESS_KEY, "--secret", SECRET_KEY, "--region", REGION]
        where = ["--endpoint-url", f"http://{self.endpoint}"]
        command = [str(find_tool(self.tool)), "admin", *account, *where, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise ServerUnavailableError(
                f"versitygw admin {arguments[0]}: {done.stdout}{done.stderr}"
            )
