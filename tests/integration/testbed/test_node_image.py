"""The versions that the test bed pins beside its Go modules match those in the pinned modules."""

from __future__ import annotations

import re

from testbed import config, nodeimage


def test_the_node_image_is_the_default_of_the_pinned_kind() -> None:
    source = nodeimage.kind_source() / "pkg/apis/config/defaults/image.go"
    found = re.search(r'^const Image = "(.*)"$', source.read_text(), re.M)
    assert found.group(1) == config.KINDEST_NODE
