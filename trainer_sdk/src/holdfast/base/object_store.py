"""`Folder(store=...)`: checks the URL and that the packages of the extra are installed."""

from __future__ import annotations

import importlib.util

from holdfast_core.errors import ConfigError
from holdfast_core.store_url import StoreUrl, parse_store_url

_PACKAGES = ("minio", "zstandard")


def required_store(url: str) -> StoreUrl:
    """Return the parsed URL.

    Raises:
        ConfigError: It is not a URL of a store, or a package is not installed.
    """
    parsed = parse_store_url(url)
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the store {url!r} needs the packages {' and '.join(missing)}, which are not "
            'installed: pip install "holdfast-sdk[s3]"'
        )
    return parsed
