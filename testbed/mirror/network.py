"""Network of the simulated machine: a separate namespace, because two engines would share one firewall.

Each Docker engine flushes and writes the same iptables chains when it starts, and both clusters are called
`holdfast`. In a namespace their bridges, rules and published ports do not conflict.
"""

from __future__ import annotations

import os
from pathlib import Path

from testbed.shell import BedError, answers, run

NAME = "holdfast-mirror"
LINK = "hf-mirror"
_FILE = Path("/run/netns") / NAME
_HERE, _THERE, _SUBNET = "198.18.77.1", "198.18.77.2", "198.18.77.0/30"
_MASQUERADE = ("POSTROUTING", "-s", _SUBNET, "-j", "MASQUERADE")
_CUT_OFF = ("DOCKER-USER", "-o", "eth0", "-j", "REJECT")


def up() -> None:
    """Ensure that the namespace exists, with a route through this machine for builds (Debian's mirror)."""
    if not (_FILE.exists() and answers(["ip", "link", "show", LINK], env=os.environ)):
        down()  # remove what a crash left
        run(["ip", "netns", "add", NAME])
        run(["ip", "link", "add", LINK, "type", "veth", "peer", "name", "eth0", "netns", NAME])
        run(["ip", "addr", "add", f"{_HERE}/30", "dev", LINK])
        run(["ip", "link", "set", LINK, "up"])
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{_THERE}/30", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", _HERE),
        ):
            run(["ip", "-n", NAME, *words])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")
    if not answers(["iptables", "-t", "nat", "-C", *_MASQUERADE], env=os.environ):
        run(["iptables", "-t", "nat", "-A", *_MASQUERADE])


def inside() -> bool:
    own = Path("/proc/self/ns/net").stat()
    return _FILE.exists() and os.path.samestat(own, _FILE.stat())


def enter(command: list[str]) -> list[str]:
    """Return the command that runs `command` in the namespace.

    It shares this machine's files and processes.
    """
    if not _FILE.exists():
        raise BedError("the mirror is not up", "python3 -m testbed.mirror up")
    return ["nsenter", f"--net={_FILE}", *command]


def cut_off_bridges() -> None:
    """Reject packets of containers that would leave this machine, as local mode does.

    Must run in the namespace.
    """
    if not answers(["iptables", "-C", *_CUT_OFF], env=os.environ):
        run(["iptables", "-I", *_CUT_OFF])


def down() -> None:
    run(["ip", "netns", "del", NAME], check=False)
    run(["ip", "link", "del", LINK], check=False)
    run(["iptables", "-t", "nat", "-D", *_MASQUERADE], check=False)
