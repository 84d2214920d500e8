"""A played server of the XML interface of Google Cloud Storage, for tests only.

No emulator of the registries honours `x-goog-if-generation-match: 0` there. This server is written from the
documented rules of the service, which it follows for the requests that obstore sends:

* An object appears at once, when its request or its upload in parts is complete, and replaces an older one.
* `x-goog-if-generation-match: 0` on PUT, also of a copy, succeeds only if the key is free. Otherwise the
  status is 412 with the code PreconditionFailed. Of concurrent requests one succeeds.
* A copy takes the metadata of its source, unless it says otherwise.
* A part has at least 5 MiB, except the last. An upload has at most 10,000 of them.
* A listing shows what was written before it, in order, at most 1,000 keys or folders on a page.
* DELETE and GET of an absent object have status 404 with the code NoSuchKey; HEAD has no body.
* A token is accepted that the key of the service account signed (RS256), or that the metadata server gave.
* As a proxy it plays `accounts.google.com`, which gives a token for the login of a person.
* `x-goog-hash` has the CRC32C of an object, and of a body, which is then compared.

It cannot show what Google's own servers do beyond these rules: times, limits of rates, codes of errors that
are not documented, and whether they keep the rules under load. `ignores_conditions` makes it fail as the
emulators do, so that a test shows that the probe of a store finds such a server.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from holdfast_core.contract import StoreConfig
from holdfast_core.format.canonical import crc32c

BUCKET = "holdfast"
ACCOUNT = "trainer@team.iam.gserviceaccount.com"
LOGIN = {
    "client_id": "gcloud",
    "client_secret": "secret-of-gcloud",
    "refresh_token": "login-of-ann",
}
_PAGE = 1000
_LEAST_PART = 5 << 20
_TOKEN = "token-of-the-metadata-server"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass(frozen=True)
class _Object:
    data: bytes
    metadata: Mapping[str, str]
    generation: int
    written: datetime

    @property
    def headers(self) -> dict[str, str]:
        crc = base64.b64encode(crc32c(self.data).to_bytes(4, "big")).decode()
        return {
            **self.metadata,
            "ETag": f'"{self.generation:x}"',
            "Last-Modified": format_datetime(self.written, usegmt=True),
            "x-goog-generation": str(self.generation),
            "x-goog-hash": f"crc32c={crc}",
        }


@dataclass
class _Upload:
    key: str
    metadata: Mapping[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


class _RefusedError(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message


class PlayedGoogle(ThreadingHTTPServer):
    """The server, in threads of this process: `with PlayedGoogle() as server:`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ignores_conditions = False
        """Whether it replaces objects as the emulators do."""
        self.is_forbidden = False
        """Whether the account lacks the role for the buckets."""
        self.gives_tokens = True
        """Whether the metadata server has an identity for this process, and a person is logged in."""
        self.tls: ssl.SSLContext | None = None
        """What the server shows as `accounts.google.com`."""
        self.asked = list[tuple[str, str, dict[str, str]]]()
        """Method, path with query, and headers of each request."""
        self.stored: dict[str, dict[str, _Object]] = {BUCKET: {}}
        self.uploads: dict[str, _Upload] = {}
        self.lock = threading.Lock()
        self._generation = 0
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def environment(self, key_file: str) -> dict[str, str]:
        """Return endpoint and key as users set them."""
        return {
            "GOOGLE_BASE_URL": f"http://{self.endpoint}",
            "GOOGLE_APPLICATION_CREDENTIALS": key_file,
        }

    def config(self, prefix: str = "", bucket: str = BUCKET) -> StoreConfig:
        return StoreConfig(self.endpoint, False, bucket, prefix, "", google="key")

    def create_bucket(self) -> str:
        """Return the name of a new bucket without objects."""
        name = f"test_{secrets.token_hex(6)}"
        self.stored[name] = {}
        return name

    def key(self, **changes: Any) -> str:
        """Return the text of the file with the key of the account."""
        pem = self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        document = {
            "type": "service_account",
            "private_key_id": "1",
            "private_key": pem.decode(),
            "client_email": ACCOUNT,
        }
        return json.dumps({**document, **changes}, indent=2)

    def replace_key(self) -> None:
        """Accept the tokens of a new key only."""
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def expect_token(self, token: str) -> None:
        """Raise _RefusedError unless the server accepts this token."""
        if token == _TOKEN:
            return
        refused = _RefusedError(401, "AuthenticationRequired", "Authentication required.")
        signed, _, signature = token.rpartition(".")
        try:
            claims = json.loads(_decoded(signed.partition(".")[2]))
            self._key.public_key().verify(
                _decoded(signature), signed.encode(), padding.PKCS1v15(), hashes.SHA256()
            )
        except (InvalidSignature, ValueError):
            raise refused from None
        if claims["iss"] != ACCOUNT or claims["exp"] < datetime.now(UTC).timestamp():
            raise refused

    def put(
        self, bucket: str, key: str, data: bytes, metadata: Mapping[str, str], *, if_free: bool
    ) -> _Object:
        """Store an object at once. The lock makes of concurrent conditional writers one succeed."""
        with self.lock:
            objects = self.stored[bucket]
            if if_free and key in objects and not self.ignores_conditions:
                raise _RefusedError(
                    412,
                    "PreconditionFailed",
                    "At least one of the pre-conditions you specified did not hold.",
                )
            self._generation += 1
            now = datetime.now(UTC)
            objects[key] = _Object(data, metadata, self._generation, now)
            return objects[key]


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PlayedGoogle

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing to stderr."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def do_CONNECT(self) -> None:
        """Play the host that the client wants to reach."""
        assert self.path == "accounts.google.com:443" and self.server.tls is not None
        self.send_response(200)
        self.end_headers()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", buffering=0)

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, dict(self.headers)))
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        bucket, _, key = unquote(url.path.lstrip("/")).partition("/")
        try:
            if bucket == "computeMetadata":
                self._metadata()
            elif url.path == "/o/oauth2/token":
                self._login(dict(parse_qsl(body.decode())))
            elif bucket == "":
                raise _RefusedError(400, "InvalidURI", "Couldn't parse the specified URI.")
            else:
                self._expect_access(bucket)
                self._requests()[self.command](bucket, key, query, body)
        except _RefusedError as error:
            text = f"<Code>{error.code}</Code><Message>{escape(error.message)}</Message>"
            document = f"<?xml version='1.0' encoding='UTF-8'?><Error>{text}</Error>"
            self._reply(error.status, document.encode())

    def _requests(self) -> dict[str, Callable[[str, str, dict[str, str], bytes], None]]:
        return {
            "GET": lambda bucket, key, query, _: (
                self._get(bucket, key) if key else self._list(bucket, query)
            ),
            "HEAD": lambda bucket, key, *_: self._get(bucket, key),
            "PUT": self._put,
            "POST": self._post,
            "DELETE": lambda bucket, key, query, _: self._delete(bucket, key, query),
        }

    def _expect_access(self, bucket: str) -> None:
        self.server.expect_token(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if bucket not in self.server.stored:
            raise _RefusedError(404, "NoSuchBucket", "The specified bucket does not exist.")
        if self.server.is_forbidden:
            raise _RefusedError(403, "AccessDenied", "Access denied.")

    def _metadata(self) -> None:
        if self.headers.get("Metadata-Flavor") != "Google" or not self.server.gives_tokens:
            raise _RefusedError(404, "", "no service account")
        self._give_token()

    def _login(self, given: dict[str, str]) -> None:
        if given != {"grant_type": "refresh_token", **LOGIN} or not self.server.gives_tokens:
            self._reply(400, b'{"error": "invalid_grant"}', {"Content-Type": "application/json"})
            return
        self._give_token()

    def _give_token(self) -> None:
        token = {"access_token": _TOKEN, "expires_in": 3600, "token_type": "Bearer"}
        self._reply(200, json.dumps(token).encode(), {"Content-Type": "application/json"})

    def _found(self, bucket: str, key: str) -> _Object:
        try:
            return self.server.stored[bucket][key]
        except KeyError:
            raise _RefusedError(404, "NoSuchKey", "The specified key does not exist.") from None

    def _given(self) -> dict[str, str]:
        names = ("content-type", "x-goog-meta-")
        return {k: v for k, v in self.headers.items() if k.lower().startswith(names)}

    def _get(self, bucket: str, key: str) -> None:
        found = self._found(bucket, key)
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if match is None:
            self._reply(200, found.data, found.headers)
            return
        start, last = int(match.group(1)), min(int(match.group(2)), len(found.data) - 1)
        if start > last:
            raise _RefusedError(416, "InvalidRange", "The requested range cannot be satisfied.")
        where = {"Content-Range": f"bytes {start}-{last}/{len(found.data)}"}
        self._reply(206, found.data[start : last + 1], found.headers | where)

    def _put(self, bucket: str, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            upload = self._upload(query)
            upload.parts[int(query["partNumber"])] = body
            self._reply(200, b"", {"ETag": f'"{crc32c(body):08x}"'})
            return
        metadata = self._given()
        source = self.headers.get("x-goog-copy-source")
        if source is not None:
            copied = self._found(*unquote(source).split("/", 1))
            body, metadata = copied.data, dict(copied.metadata)
        given = re.search(r"crc32c=(\S+)", self.headers.get("x-goog-hash", ""))
        if given is not None and crc32c(body) != int.from_bytes(base64.b64decode(given[1]), "big"):
            raise _RefusedError(400, "BadDigest", "The CRC32C you specified did not match.")
        if_free = self.headers.get("x-goog-if-generation-match") == "0"
        stored = self.server.put(bucket, key, body, metadata, if_free=if_free)
        copy = b"<CopyObjectResult></CopyObjectResult>" if source is not None else b""
        self._reply(200, copy, stored.headers)

    def _post(self, bucket: str, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploads" in query:
            name = secrets.token_hex(8)
            self.server.uploads[name] = _Upload(key, self._given())
            self._document("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
            return
        upload = self._upload(query)
        numbers = [
            int(node.text or "")
            for node in ElementTree.fromstring(body).iter()
            if node.tag.endswith("PartNumber")
        ]
        parts = [upload.parts[number] for number in numbers]
        if any(len(part) < _LEAST_PART for part in parts[:-1]) or len(parts) > 10_000:
            raise _RefusedError(400, "EntityTooSmall", "A part is smaller than 5 MiB.")
        stored = self.server.put(bucket, key, b"".join(parts), upload.metadata, if_free=False)
        del self.server.uploads[query["uploadId"]]
        self._document("CompleteMultipartUploadResult", f"<ETag>{stored.headers['ETag']}</ETag>")

    def _upload(self, query: dict[str, str]) -> _Upload:
        try:
            return self.server.uploads[query["uploadId"]]
        except KeyError:
            raise _RefusedError(404, "NoSuchUpload", "The upload does not exist.") from None

    def _delete(self, bucket: str, key: str, query: dict[str, str]) -> None:
        if "uploadId" in query:
            self.server.uploads.pop(query["uploadId"], None)
        else:
            with self.server.lock:
                self._found(bucket, key)
                del self.server.stored[bucket][key]
        self._reply(204, b"")

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after") or ""
        with self.server.lock:
            objects = dict(self.server.stored[bucket])
        shown = dict[str, _Object | None]()
        for key in sorted(objects):
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if end < 0 else key[: end + 1]
            if key.startswith(prefix) and name > after:
                shown[name] = objects[key] if end < 0 else None
        page = list(shown.items())[: min(_PAGE, int(query.get("max-keys", _PAGE)))]
        text = "".join(_entry(name, found) for name, found in page)
        if len(page) < len(shown):
            text += f"<NextContinuationToken>{page[-1][0]}</NextContinuationToken>"
        self._document("ListBucketResult", text)

    def _document(self, name: str, text: str) -> None:
        self._reply(200, f"<?xml version='1.0' encoding='UTF-8'?><{name}>{text}</{name}>".encode())

    def _reply(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(name: str, found: _Object | None) -> str:
    if found is None:
        return f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
    fields = {
        "Key": name,
        "LastModified": found.written.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "ETag": found.headers["ETag"].replace('"', "&quot;"),
        "Size": str(len(found.data)),
    }
    text = "".join(f"<{key}>{value}</{key}>" for key, value in fields.items())
    return f"<Contents>{text}</Contents>"
