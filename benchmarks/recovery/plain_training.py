"""What people have today: ranks that torch.save to an S3 store, and load the newest file after a restart.

Runs in the pods of a plain Kubernetes Job (plain_job.py) with the standard library and torch alone. Every
rank saves its state every 20 steps, one after the other file, and rank 0 then names the step in `latest`.
"""

import datetime
import hashlib
import hmac
import http.client
import json
import os
import time
import urllib.parse
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

INTERVAL = 20


def s3(method: str, key: str, body: Any = b"", into: BinaryIO | None = None) -> int:
    """Send one request, signed with AWS Signature Version 4. Return the status."""
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


def put(key: str, file: str) -> None:
    with open(file, "rb") as body:
        s3("PUT", key, body)


def main() -> None:
    rank, file = int(os.environ["JOB_COMPLETION_INDEX"]), "/tmp/state.pt"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=120),
    )
    state: dict[str, Any] = {"step": 0, "ballast": torch.zeros(int(os.environ["STATE_MIB"]) << 18)}
    with open("/tmp/latest", "wb") as latest:
        found = s3("GET", "latest", into=latest) == 200
    if found:
        with open("/tmp/latest") as latest:
            step = latest.read()
        with open(file, "wb") as body:
            s3("GET", f"{step}-{rank}.pt", into=body)
        state = torch.load(file)
    began, base = time.time(), state["step"]
    while True:
        total = torch.ones(1)
        dist.all_reduce(total)
        state["ballast"].add_(1.0)
        time.sleep(0.05)
        state["step"] += 1
        if rank == 0:
            print(json.dumps({"began": began, "base": base, "step": state["step"]}), flush=True)
        if state["step"] % INTERVAL == 0:
            torch.save(state, file)
            put(f"{state['step']}-{rank}.pt", file)
            dist.barrier()
            if rank == 0:
                s3("PUT", "latest", str(state["step"]).encode())


if __name__ == "__main__":
    main()
