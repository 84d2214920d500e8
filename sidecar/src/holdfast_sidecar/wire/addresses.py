"""Addresses of the members' sidecars.

`Member.address` is a pod IP, and the ports are those of the contract. The form `ip:control_port:bulk_port`
also names the ports, so that several sidecars on one machine (tests, the local demo) can be members of one
job.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from holdfast_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host and ports of one sidecar."""

    host: str
    control_port: int
    bulk_port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.control_port}"


def parse_address(address: str, *, control_port: int, bulk_port: int) -> Endpoint | None:
    """Parse `Member.address`.

    Args:
        control_port: The port if the address does not name one.
        bulk_port: The port if the address does not name one.

    Returns:
        The endpoint, or None if the address is unknown ("").

    Raises:
        ConfigError: The text is not an address.
    """
    if not address:
        return None
    if _is_ip(address):
        return Endpoint(address, control_port, bulk_port)
    host, _, ports = address.partition(":")
    if address.startswith("["):
        host, _, ports = address[1:].partition("]:")
    control, _, bulk = ports.partition(":")
    if not _is_ip(host) or not (control.isdecimal() and bulk.isdecimal()):
        raise ConfigError(
            f"member address {address!r}: expected a pod IP, or ip:control_port:bulk_port"
        )
    return Endpoint(host, int(control), int(bulk))


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
