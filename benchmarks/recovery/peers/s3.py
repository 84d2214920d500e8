"""Requests to an S3 store from a peer's pod, with the standard library alone."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import os
import urllib.parse
from typing import Any, BinaryIO


def s3(method: str, key: str, body: Any = b"", into: BinaryIO | None = None) -> int:
    """Send one request, signed with AWS Signature Version 4. Return the status.

    Args:
        method: GET or PUT.
        key: Key of the object below PREFIX.
        body: Bytes, or a file, to send.
        into: Receives the bytes of the reply if the status is 200.

    Raises:
        OSError: the status is neither 200 nor 404.
    """
    store = urllib.parse.urlsplit(os.environ["STORE"])
    now = datetime.datetime.now(datetime.UTC)
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    path = f"{store.path}/{os.environ['PREFIX']}/{key}"
    headers = {
        "host": store.netloc,
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
        "x-amz-date": stamp,
    }
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = f"{method}\n{path}\n\n{lines}\n{names}\nUNSIGNED-PAYLOAD"
    scope = f"{day}/us-east-1/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key_ = ("AWS4" + os.environ["SECRET_KEY"]).encode()
    for part in (day, "us-east-1", "s3", "aws4_request"):
        key_ = hmac.new(key_, part.encode(), hashlib.sha256).digest()
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
    signature = hmac.new(key_, text.encode(), hashlib.sha256).hexdigest()
    access = f"{os.environ['ACCESS_KEY']}/{scope}"
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={access}, SignedHeaders={names}, Signature={signature}"
    )
    if not isinstance(body, bytes):  # http.client would send it in chunks, which S3 refuses
        headers["content-length"] = str(os.fstat(body.fileno()).st_size)
    connection = http.client.HTTPConnection(store.netloc, timeout=60)
    connection.request(method, path, body=body, headers=headers)
    response = connection.getresponse()
    if into is not None and response.status == 200:
        while piece := response.read(1 << 20):
            into.write(piece)
    else:
        response.read()
    if response.status not in (200, 404):
        raise OSError(f"{method} {path}: status {response.status}")
    return response.status


def upload(file: str, key: str) -> None:
    with open(file, "rb") as body:
        s3("PUT", key, body)


def download(key: str, file: str) -> bool:
    """Return whether the store has the object. If it has, its bytes are in `file`."""
    with open(file, "wb") as into:
        return s3("GET", key, into=into) == 200
