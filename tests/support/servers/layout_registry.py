"""A registry that serves one repository from the files of an OCI layout, for clients that pull."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextmanager
def serve_layout(repository: str, files: dict[str, bytes]) -> Iterator[str]:
    """Serve the layout and yield the registry's address, host:port."""
    index = json.loads(files["index.json"])
    manifests = {one["digest"]: one for one in index["manifests"]}
    manifests |= {
        one["annotations"]["org.opencontainers.image.ref.name"]: one for one in index["manifests"]
    }

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, found = self._find()
            self.send_response(200 if found is not None else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(found or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(found or b"")

        do_HEAD = do_GET

        def _find(self) -> tuple[str, bytes | None]:
            *start, folder, name = self.path.strip("/").split("/")
            if not folder:
                return "application/json", b"{}"
            if start != ["v2", *repository.split("/")]:
                return "application/json", b"{}" if self.path == "/v2/" else None
            kind = "application/octet-stream"
            if folder == "manifests" and (known := manifests.get(name)):
                kind, name = known["mediaType"], known["digest"]
            return kind, files.get(f"blobs/{name.replace(':', '/')}")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
