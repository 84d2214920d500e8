"""The server that discards uploads sends the answers that S3 clients require, over real connections."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.datapath.ours import DrainingStore, HoldfastUploader

MIB = 1 << 20
CRC = "x-amz-checksum-crc32c"


@pytest.fixture
def store() -> Iterator[dict[str, str]]:
    with DrainingStore() as store:
        yield store


@pytest.fixture
def connection(store: dict[str, str]) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(store["endpoint"], timeout=30)
    yield connection
    connection.close()


def ask(
    connection: http.client.HTTPConnection, method: str, path: str, **kwargs: object
) -> http.client.HTTPResponse:
    connection.request(method, path, **kwargs)  # type: ignore[arg-type]
    reply = connection.getresponse()
    reply.read()
    return reply


@pytest.mark.parametrize("mib", [8, 80])
def test_an_upload_of_ours_is_confirmed_and_removed(
    store: dict[str, str], tmp_path: Path, mib: int
) -> None:
    uploader = HoldfastUploader(store, tmp_path, mib)
    for step in (1, 2):
        uploader.prepare(step)
        uploader.upload(step)
        uploader.remove(step)


def test_an_object_has_the_size_and_the_checksum_that_were_sent(
    connection: http.client.HTTPConnection,
) -> None:
    ask(connection, "PUT", "/b/key", body=b"x" * (5 * MIB), headers={CRC: "AAAAAA=="})
    found = ask(connection, "HEAD", "/b/key")
    assert (found.headers["Content-Length"], found.headers[CRC]) == (str(5 * MIB), "AAAAAA==")
    assert ask(connection, "DELETE", "/b/key").status == 204
    assert ask(connection, "HEAD", "/b/key").status == 404


def test_a_body_in_chunks_is_dropped_to_its_end(connection: http.client.HTTPConnection) -> None:
    pieces = [b"a" * 100, b"b" * MIB, b"c"]
    reply = ask(
        connection,
        "PUT",
        "/b/key",
        body=iter(pieces),
        headers={"Transfer-Encoding": "chunked", "x-amz-decoded-content-length": str(MIB + 101)},
        encode_chunked=True,
    )
    assert reply.status == 200
    assert ask(connection, "HEAD", "/b/key").headers["Content-Length"] == str(MIB + 101)


def test_what_it_cannot_do_is_reported(connection: http.client.HTTPConnection) -> None:
    assert ask(connection, "GET", "/b/key").status == 501
