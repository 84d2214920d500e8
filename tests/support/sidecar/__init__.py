"""Doubles around the sidecar, for tests and the local demo.

There are a scripted launcher and scripted ranks, which use the real socket and real slot files, a scripted
operator that uses HTTPS, and the real sidecar as a child process. The sidecar itself never imports this
package.
"""

from tests.support.sidecar.local import FakeLauncher, LocalClient
from tests.support.sidecar.operator import FakeOperator
from tests.support.sidecar.processes import SidecarProcess, flip_a_bit
from tests.support.sidecar.ranks import FakeRank, rank_document
from tests.support.sidecar.waiting import DEADLINE_SECONDS, until

__all__ = [
    "DEADLINE_SECONDS",
    "FakeLauncher",
    "FakeOperator",
    "FakeRank",
    "LocalClient",
    "SidecarProcess",
    "flip_a_bit",
    "rank_document",
    "until",
]
