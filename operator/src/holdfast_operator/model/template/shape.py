"""Check the types of those fields of a template that the operator reads. Pure.

The CRD keeps the template as it is, so a user may write `env` as a map or `memory: 4GB`. The API server
checks a whole pod (loop/checks.py), but it may be away, and the template can be edited at any time.
Code that renders or reads a template relies on this check: it raises for no template that passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from holdfast_core.api import Gang, parse_quantity_bytes
from holdfast_core.errors import ConfigError
from holdfast_operator.model.template.isolation import Breach

_Shape = Callable[[str, Any], Iterator[Breach]]
"""Yields the faults of the value at a path."""
_MAX_SHOWN = 80


def find_misfit(template: Mapping[str, Any]) -> Breach | None:
    """Return the first field that the operator reads and whose value has another type than in a pod."""
    return next(_TEMPLATE("spec.template", template), None)


def pod_spec(job: Gang) -> Mapping[str, Any]:
    """Return the PodSpec of the job's template.

    It is empty if another controller creates the pods, or if the template does not pass `find_misfit`.
    """
    template = job.spec.template
    if template is None or find_misfit(template) is not None:
        return {}
    spec: Mapping[str, Any] = template.get("spec") or {}
    return spec


def _fault(path: str, value: Any, expected: str) -> Breach:
    return Breach(path, f"is {_kind(value)}, expected {expected}, as in the template of any pod")


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
        case _:
            return "a list"


def _text(path: str, value: Any) -> Iterator[Breach]:
    if not isinstance(value, str):
        yield _fault(path, value, "a string")


def _integer(path: str, value: Any) -> Iterator[Breach]:
    if not isinstance(value, int) or isinstance(value, bool):
        yield _fault(path, value, "an integer")


def _quantity(path: str, value: Any) -> Iterator[Breach]:
    try:
        parse_quantity_bytes("" if isinstance(value, bool) else str(value))
    except ConfigError:
        shown = repr(value)[:_MAX_SHOWN]
        yield Breach(
            path,
            f"is {shown}, expected a number of bytes with an optional suffix (Ki, Mi, Gi, Ti, k, M, G, T), "
            "for example 4Gi",
        )


def _texts(path: str, value: Any) -> Iterator[Breach]:
    if not isinstance(value, Mapping):
        yield _fault(path, value, "an object")
        return
    for key, text in value.items():
        yield from _text(f"{path}.{key}", text)


def _object(**fields: _Shape) -> _Shape:
    """Return the shape of an object with these fields. A field that is null counts as absent."""

    def check(path: str, value: Any) -> Iterator[Breach]:
        if not isinstance(value, Mapping):
            yield _fault(path, value, "an object")
            return
        for name, shape in fields.items():
            if value.get(name) is not None:
                yield from shape(f"{path}.{name}", value[name])

    return check


def _list(item: _Shape) -> _Shape:
    def check(path: str, value: Any) -> Iterator[Breach]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            yield _fault(path, value, "a list")
            return
        for index, found in enumerate(value):
            yield from item(f"{path}[{index}]", found)

    return check


_ANY = _object()
_TERM = _object(matchFields=_list(_ANY), matchExpressions=_list(_ANY))
_CONTAINER = _object(
    name=_text,
    command=_list(_text),
    args=_list(_text),
    env=_list(_object(name=_text)),
    envFrom=_list(_ANY),
    volumeMounts=_list(_object(name=_text, mountPath=_text)),
    volumeDevices=_list(_object(name=_text)),
    securityContext=_ANY,
    resources=_object(limits=_object(memory=_quantity)),
)
_AFFINITY = _object(
    nodeAffinity=_object(
        requiredDuringSchedulingIgnoredDuringExecution=_object(nodeSelectorTerms=_list(_TERM))
    ),
    podAntiAffinity=_object(preferredDuringSchedulingIgnoredDuringExecution=_list(_ANY)),
)
_TEMPLATE = _object(
    metadata=_object(labels=_texts, annotations=_texts),
    spec=_object(
        containers=_list(_CONTAINER),
        initContainers=_list(_CONTAINER),
        volumes=_list(_object(name=_text)),
        securityContext=_ANY,
        affinity=_AFFINITY,
        tolerations=_list(_ANY),
        terminationGracePeriodSeconds=_integer,
        nodeName=_text,
    ),
)
