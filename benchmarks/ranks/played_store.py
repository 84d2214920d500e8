"""A server that lists and deletes objects as an S3 store does. Its objects have names, but no bytes.

For the benchmark of sweeps only: a real store with millions of objects does not fit on one machine. It
verifies no signatures, and every object is some years old.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from urllib.parse import parse_qs, quote, urlsplit
from xml.etree import ElementTree

from holdfast_core.format import keys
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import CheckpointId, JobUid, Rank, RestartRound, ShardRef, Step

PAGE = 1000
"""Largest number of keys and folders in one page of a listing, as in S3."""
BUCKET = "played"
NAMESPACE = "bench"
JOB_UID = JobUid("b0b0b0b0-0000-4000-8000-000000000007")
_BEHIND = "\U0010ffff"
_REST = (
    "<LastModified>2020-01-01T00:00:00.000Z</LastModified>"
    "<ETag>&#34;0123456789abcdef0123456789abcdef-32&#34;</ETag><Size>1073741824</Size>"
    "<StorageClass>STANDARD</StorageClass>"
)
"""What a store says about an object besides its name."""
_XML = '<?xml version="1.0" encoding="UTF-8"?>'


class Names:
    """The sorted names of all objects. Thread-safe."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lock = Lock()
        self._names = sorted(names)
        self._deleted = bytearray(len(self._names))

    def delete(self, name: str) -> None:
        with self._lock:
            index = bisect_left(self._names, name)
            if index < len(self._names) and self._names[index] == name:
                self._deleted[index] = 1

    def left(self) -> list[str]:
        """Return the names that were not deleted."""
        with self._lock:
            pairs = zip(self._names, self._deleted, strict=True)
            return [name for name, deleted in pairs if not deleted]

    def page(self, prefix: str, after: str, delimiter: str) -> tuple[list[str], list[str], str]:
        """Return the keys and the folders of a page, and the token of the next one, "" at the end.

        A token is the last key or folder of its page.
        """
        objects: list[str] = []
        folders: list[str] = []
        with self._lock:
            behind = after + _BEHIND if delimiter and after.endswith(delimiter) else after + "\0"
            index = bisect_left(self._names, max(prefix, behind) if after else prefix)
            last = ""
            while index < len(self._names) and self._names[index].startswith(prefix):
                name = self._names[index]
                if self._deleted[index]:
                    index += 1
                    continue
                if len(objects) + len(folders) == PAGE:
                    return objects, folders, last
                folder, found, _ = name[len(prefix) :].partition(delimiter or "\0")
                if found:
                    last = prefix + folder + delimiter
                    folders.append(last)
                    index = bisect_left(self._names, last + _BEHIND)
                else:
                    last = name
                    objects.append(last)
                    index += 1
        return objects, folders, ""


def names_of(checkpoints: int, ranks: int) -> list[str]:
    """Return the names of a job's objects: one checkpoint in ten is incomplete, as `is_dead` says.

    Every checkpoint has a shard and a layout of each rank, and refers to the first one of its hundred.
    """
    base = keys.job_prefix(NAMESPACE, JOB_UID)
    names: list[str] = []
    for number in range(checkpoints):
        checkpoint, first = named(number), named(first_of(number))
        if not is_dead(number):
            names.append(keys.manifest_key(checkpoint))
        if first != checkpoint:
            names.append(keys.needs_key(checkpoint, first, 1 << 30))
            names.append(keys.needed_by_key(first, checkpoint))
        for rank in range(ranks):
            digest = digest_of(f"{number}/{rank}".encode())
            ref = ShardRef(JOB_UID, checkpoint.step, checkpoint.round, Rank(rank), digest)
            names += (keys.shard_key(ref), keys.stored_layout_key(ref))
    return [base + name for name in names]


def named(number: int) -> CheckpointId:
    return CheckpointId(Step(10 * (number + 1)), RestartRound(0))


def first_of(number: int) -> int:
    """Return the number of the checkpoint that this one refers to."""
    return number - number % 100


def is_dead(number: int) -> bool:
    """Return whether the checkpoint has no manifest, as after an upload that ended with its pods."""
    return number % 10 == 5


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        if query.get("list-type") != "2":
            self._reply(501, "")
            return
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        token = query.get("continuation-token", "")
        objects, folders, following = self.server.names.page(prefix, token, delimiter)
        parts = [f"<Contents><Key>{quote(key)}</Key>{_REST}</Contents>" for key in objects]
        parts += [f"<CommonPrefixes><Prefix>{quote(f)}</Prefix></CommonPrefixes>" for f in folders]
        parts.append(f"<IsTruncated>{'true' if following else 'false'}</IsTruncated>")
        if following:
            parts.append(f"<NextContinuationToken>{following}</NextContinuationToken>")
        encoding = "<EncodingType>url</EncodingType>"
        self._reply(200, f"<ListBucketResult>{encoding}{''.join(parts)}</ListBucketResult>")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for item in ElementTree.fromstring(body).iter():
            if item.tag.endswith("}Key") or item.tag == "Key":
                self.server.names.delete(item.text or "")
        self._reply(200, "<DeleteResult></DeleteResult>")

    def _reply(self, status: int, document: str) -> None:
        self.server.requests += 1
        body = (_XML + document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/xml")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, names: Names) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.names = names
        self.requests = 0


def main() -> int:
    """Serve until standard input ends. Then print the number of requests and of the objects left."""
    checkpoints, ranks = int(sys.argv[1]), int(sys.argv[2])
    with _Server(Names(names_of(checkpoints, ranks))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()
        print(server.requests, len(server.names.left()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
