"""spec.template: a PodTemplateSpec of which the CRD knows only what our rules read.

Embedding PodSpec would cost more than 450 KB of schema, so everything else is kept as it is
(preserve-unknown-fields) and checked by the API server when the operator dry-runs a pod.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from holdfast_core.api.rules import RULES, rule

_OPEN: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}

_TRAINERS = "self.spec.containers.filter(c, has(c.name) && c.name == 'trainer')"

_COMMAND: dict[str, Any] = {
    "type": "array",
    "maxItems": 32,
    "items": {"type": "string", "maxLength": 8192},
}

# Anywhere in the words, because `sh -c "... holdfast run ..."` and `tini -- holdfast run` are good.
_LAUNCHED = (
    "self.spec.containers.all(c, !has(c.name) || c.name != 'trainer' || !has(c.command)"
    " || c.command.exists(a, a.contains('holdfast'))"
    " || (has(c.args) && c.args.exists(a, a.contains('holdfast'))))"
)

_CONTAINER: dict[str, Any] = {
    **_OPEN,
    "properties": {
        "name": {"type": "string", "maxLength": 63, "description": "Name of the container."},
        "command": {**_COMMAND, "description": "Replaces the image's entry point."},
        "args": {
            **_COMMAND,
            "maxItems": 128,
            "description": "Arguments of the command, or of the image's entry point.",
        },
    },
}

TEMPLATE_SCHEMA: dict[str, Any] = {
    **_OPEN,
    "required": ["spec"],
    "properties": {
        "spec": {
            **_OPEN,
            "description": "PodSpec. The operator adds the sidecar, its volumes and the "
            "environment; it adds no privilege.",
            "required": ["containers"],
            "properties": {
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 10,
                    "description": (
                        "Containers of a worker. The container named `trainer` runs the training."
                    ),
                    "items": _CONTAINER,
                },
                "restartPolicy": {
                    "type": "string",
                    "maxLength": 16,
                    "description": "OnFailure. The operator sets it if it is absent.",
                },
            },
        }
    },
    RULES: [
        rule(
            f"{_TRAINERS}.size() == 1",
            message_expression=(
                '\'template.spec.containers has %d containers named "trainer", exactly one is '
                'expected: name the container that runs the training "trainer"\''
                f".format([{_TRAINERS}.size()])"
            ),
            field_path=".spec.containers",
        ),
        rule(
            _LAUNCHED,
            message="template: the command of container trainer does not use the launcher, so a "
            "lost rank could not be restarted: put `holdfast run --` before it, for example "
            'command: ["holdfast", "run", "--", "python", "train.py"]',
            field_path=".spec.containers",
        ),
        rule(
            "!has(self.spec.restartPolicy) || self.spec.restartPolicy == 'OnFailure'",
            message_expression=(
                "'template.spec.restartPolicy is %s, expected OnFailure: the operator restarts "
                "the gang by rounds, and a container that ends must be restarted in its pod; omit "
                "the field'.format([self.spec.restartPolicy])"
            ),
            field_path=".spec.restartPolicy",
        ),
    ],
}

PodTemplate = Annotated[
    dict[str, Any],
    WithJsonSchema(TEMPLATE_SCHEMA),
    Field(
        description="PodTemplateSpec of every worker: any field of a pod, with exactly one "
        "container named `trainer`, which runs `holdfast run -- ...`."
    ),
]
