"""Addresses of the members' sidecars.

`Member.address` is a pod IP, and the ports are those of the contract. The form `ip:control_port:bulk_port`
also names the ports, so that several sidecars on one machine (tests, the local demo) can be members of one
job.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_core.errors import ConfigError
from holdfast_core.messages.schema import Round
from holdfast_sidecar.base.rounds import RoundState


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


class MemberAddresses:
    """Callable that returns the IP addresses of the current ROUND's members, or none while sealed."""

    def __init__(self, current: Callable[[], RoundState]) -> None:
        self._current = current
        self._known: tuple[Round | None, frozenset[str]] = None, frozenset()

    def __call__(self) -> frozenset[str]:
        accepted = self._current().accepted
        if accepted is not self._known[0]:
            members = () if accepted is None else accepted.members
            self._known = accepted, frozenset(_host(m.address) for m in members)
        return self._known[1]


def _host(address: str) -> str:
    """Return the IP address without its ports. It is only compared, so that it is not checked."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    host, _, _ = address.partition(":")
    return host if "." in host else address
