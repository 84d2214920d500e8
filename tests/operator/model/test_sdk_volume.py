"""docs/install.md: a job whose SDK comes from an init container is accepted, and its pod keeps the volume."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from tests.support.operator.builders import job

from holdfast_core.api import changed
from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.decide.facts.spec import template_problem
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.render import render_pod

PAGE = Path(__file__).resolve().parents[3] / "docs/install.md"


def test_the_template_of_the_page_is_accepted_and_rendered() -> None:
    section = PAGE.read_text().partition("## Images of trainers\n")[2].partition("\n## ")[0]
    (text,) = re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    template = yaml.safe_load(text)

    assert template_problem(template) is None
    base = job(2)
    given = changed(base, spec=changed(base.spec, template=template))
    sidecar = SidecarSettings("example/sidecar:1", "Always")
    spec = render_pod(given, Worker(0), RestartRound(0), None, sidecar)["spec"]

    assert [one["name"] for one in spec["initContainers"]] == ["holdfast-sidecar", "sdk"]
    (written,) = spec["initContainers"][1]["volumeMounts"]
    (trainer,) = (one for one in spec["containers"] if one["name"] == "trainer")
    read = next(one for one in trainer["volumeMounts"] if one["name"] == "sdk")
    assert spec["initContainers"][1]["args"] == [written["mountPath"]]
    assert trainer["command"][0] == f"{read['mountPath']}/bin/holdfast"
    assert {"name": "sdk", "emptyDir": {"sizeLimit": "128Mi"}} in spec["volumes"]
