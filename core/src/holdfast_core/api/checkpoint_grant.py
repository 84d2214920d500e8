"""CheckpointGrant: a namespace lets jobs of other namespaces start from its Checkpoints.

It is modelled on ReferenceGrant of the Gateway API (https://gateway-api.sigs.k8s.io/api-types/referencegrant):
the owner of what is referred to creates it, and every grant adds to the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from holdfast_core.api.base import ApiModel, ApiObject, Conditions, WithConditions
from holdfast_core.api.rules import cel_rules, rule

_MAX_ENTRIES = 64
_NAME = Annotated[str, Field(min_length=1, max_length=253)]


class GrantFrom(ApiModel):
    """Who may start from the Checkpoints."""

    namespace: Annotated[
        str,
        Field(
            max_length=63,
            description="Namespace of the jobs.",
            json_schema_extra=cel_rules(
                rule(
                    "self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
                    message_expression=(
                        '\'from.namespace is "%s", expected the name of one namespace: a grant names '
                        "each namespace that it trusts, and knows no pattern'.format([self])"
                    ),
                )
            ),
        ),
    ]
    jobs: Annotated[
        tuple[_NAME, ...],
        Field(
            max_length=_MAX_ENTRIES,
            description="Names of TrainingJobs and CheckpointAdoptions. Absent: every one of that namespace.",
        ),
    ] = ()


class GrantTo(ApiModel):
    """What they may start from."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=253, description="Name of a Checkpoint of this namespace."),
    ]


class CheckpointGrantSpec(ApiModel):
    """Which jobs may start from which Checkpoints of this namespace."""

    from_: Annotated[
        tuple[GrantFrom, ...],
        Field(
            validation_alias="from",
            serialization_alias="from",
            max_length=_MAX_ENTRIES,
            description="Jobs of other namespaces that may name the Checkpoints in spec.restoreFrom.",
            json_schema_extra=cel_rules(
                rule(
                    "self.size() > 0",
                    message="from is empty, so the grant permits nothing: name the namespace of the jobs, or "
                    "delete the grant",
                )
            ),
        ),
    ]
    to: Annotated[
        tuple[GrantTo, ...],
        Field(
            max_length=_MAX_ENTRIES,
            description="Checkpoints of this namespace. Absent: all of them, also later ones.",
        ),
    ] = ()


class CheckpointGrantStatus(WithConditions):
    """Empty. The jobs that need a grant say what is missing."""

    conditions: Conditions = ()


class CheckpointGrant(ApiObject):
    """Lets jobs of other namespaces start from Checkpoints of this one."""

    KIND: ClassVar[str] = "CheckpointGrant"
    PLURAL: ClassVar[str] = "checkpointgrants"
    SHORT_NAME: ClassVar[str] = "ckptgrant"

    api_version: Literal["holdfast.dev/v1alpha1"] = "holdfast.dev/v1alpha1"
    kind: Literal["CheckpointGrant"] = "CheckpointGrant"
    spec: CheckpointGrantSpec
    status: CheckpointGrantStatus = CheckpointGrantStatus()

    def permits(self, namespace: str, job: str, checkpoint: str) -> bool:
        """Return whether the job may start from this Checkpoint of the namespace of the grant."""
        named = any(
            f.namespace == namespace and (not f.jobs or job in f.jobs) for f in self.spec.from_
        )
        return named and (not self.spec.to or any(t.name == checkpoint for t in self.spec.to))


def is_granted(
    grants: Iterable[CheckpointGrant], namespace: str, job: str, checkpoint: str
) -> bool:
    """Return whether one of a namespace's grants lets the job start from a Checkpoint of it.

    A grant that is being deleted does not count.
    """
    return any(g.permits(namespace, job, checkpoint) for g in grants if not g.deleting)


def missing_grant(namespace: str, job: str, of: str, checkpoint: str) -> str:
    """Return the YAML of the grant that lets a job start from a Checkpoint of the namespace `of`.

    Names are quoted, because YAML does not read digits only, or `null`, as text.
    """
    return (
        "apiVersion: holdfast.dev/v1alpha1\n"
        f"kind: {CheckpointGrant.KIND}\n"
        f'metadata: {{name: "{namespace}-{job}", namespace: "{of}"}}\n'
        "spec:\n"
        f'  from: [{{namespace: "{namespace}", jobs: ["{job}"]}}]\n'
        f'  to: [{{name: "{checkpoint}"}}]\n'
    )
