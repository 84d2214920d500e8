"""The releases of the training frameworks with which the adapters were tested.

An adapter relies on details of its framework that the framework does not promise to keep. With another
release it may therefore fail, or resume with other bits. Every adapter calls `warn_if_untested` when a
script creates its main object.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import metadata

from holdfast.base.settings import RankSettings

logger = logging.getLogger(__name__)

TESTED: Mapping[str, str] = {
    "accelerate": "1.15.0",
    "datasets": "4.7.0",
    "deepspeed": "0.19.8",
    "lightning": "2.6.6",
    "megatron-core": "0.16.1",
    "torch": "2.15.0",
    "torchdata": "0.11.0",
    "torchtitan": "0.3.0",
    "transformers": "5.23.0",
    "webdataset": "1.0.2",
}
"""The version of each distribution in tests/frameworks/uv.lock. A test compares the two."""

ALSO_TESTED: Mapping[str, str] = {"megatron-core": "0.19.2"}
"""Releases for a newer Python than the one of the lock, tested by `make test-megatron`."""

_warned: set[str] = set()


def warn_if_untested(distribution: str) -> None:
    """Log one warning if the installed release of a framework is not the one that was tested.

    Rank 0 logs it, once in a process.

    distribution: name on the package index, a key of `TESTED`, for example "transformers".
    """
    if distribution in _warned or RankSettings.from_env().rank != 0:
        return
    _warned.add(distribution)
    message = untested(distribution, installed_version(distribution))
    if message is not None:
        logger.warning(message)


def untested(distribution: str, installed: str | None) -> str | None:
    """Return the warning about the version `installed`, or None if its release was tested.

    The first two numbers of a version decide. A bug-fix release (5.23.1 after 5.23.0) and a local build
    (2.15.0+cpu) count as tested.
    """
    tested = TESTED[distribution]
    releases = {_release(tested), _release(ALSO_TESTED.get(distribution, tested))}
    if installed is not None and _release(installed) in releases:
        return None
    found = "no version number" if installed is None else f"version {installed}"
    return (
        f"this adapter was tested with {distribution} {tested}, and {found} is installed: kill and "
        f"restart a short training once and compare its result with an undisturbed one, or install "
        f"{distribution}=={tested}"
    )


def installed_version(distribution: str) -> str | None:
    """Return the installed version, or None for a module without metadata, such as a source tree."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])
