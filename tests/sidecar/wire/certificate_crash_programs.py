"""Renewals of a pod's certificate, with a power cut after every change of the node volume.

Run it as a process of its own, because a tracer waits for all of its children. It prints a report as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.support.crash.crash import Report, cut_power, record, scratch
from tests.support.crash.traced import Announce
from tests.support.servers.pki import Authority
from tests.support.shards.builders import JOB_UID
from tests.support.sidecar.contracts import contract_with

from holdfast_core.contract import peer_dns_name
from holdfast_core.messages.schema import Certificate
from holdfast_sidecar.wire.certificates import Certificates

NAME = peer_dns_name("gpt-0-r0", JOB_UID)
RENEWALS = 2


def main() -> Report:
    authority = Authority()
    leaves = [authority.leaf(NAME) for _ in range(RENEWALS)]
    with scratch() as base:
        mounted = authority.write_leaf(base / "certs", NAME)

        def renew(directory: Path, announce: Announce) -> None:
            pod = contract_with(node_dir=str(directory), certs_dir=str(mounted))
            certificates = Certificates(pod)
            for number, (leaf, key) in enumerate(leaves, 1):
                certificates.renew(Certificate(leaf.decode(), key.decode()))
                announce(str(number))

        def check(directory: Path, acknowledged: Sequence[str]) -> list[str]:
            """Return a problem unless the last acknowledged certificate, or a newer one, is on the node
            volume."""
            if not acknowledged:
                return []
            kept = (directory / "certificate.pem").read_text()
            newest = [leaf.decode().strip() for leaf, _ in leaves[int(acknowledged[-1]) - 1 :]]
            return (
                []
                if any(leaf in kept for leaf in newest)
                else [f"renewal {acknowledged[-1]} is lost"]
            )

        return cut_power(record(renew), check)


if __name__ == "__main__":
    print(json.dumps(asdict(main())))
