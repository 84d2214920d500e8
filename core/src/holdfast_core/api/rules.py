"""Marks that the models put on their fields and that `crd.py` turns into a CRD's validations.

A rule lives beside the field that it guards. Every message names the field, the value and the
remedy: people read it in the terminal in which they ran `kubectl apply`.

Kubernetes quantities ("20Gi") and Go durations ("1h30m") are read and refused here too. The rules of CEL
take the same text, with bounds. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

from pydantic import AfterValidator

from holdfast_core.errors import ConfigError

RULES = "x-kubernetes-validations"
REMEDY = "x-holdfast-remedy"
"""Beside a numeric bound: how to put it right. `schema.py` consumes it; no CRD ever holds it."""


def rule(
    expression: str,
    *,
    message: str | None = None,
    message_expression: str | None = None,
    field_path: str | None = None,
    forbidden: bool = False,
) -> dict[str, Any]:
    """Return one entry of x-kubernetes-validations.

    `forbidden`: the value is fine, changing it is not (reason FieldValueForbidden). A message
    expression must stay cheap: format numbers with `%d`; `string(self.x)` breaks the cost budget.
    """
    entry: dict[str, Any] = {"rule": expression}
    if message is not None:
        entry["message"] = message
    if message_expression is not None:
        entry["messageExpression"] = message_expression
    if field_path is not None:
        entry["fieldPath"] = field_path
    entry["reason"] = "FieldValueForbidden" if forbidden else "FieldValueInvalid"
    return entry


def cel_rules(*entries: dict[str, Any]) -> dict[str, Any]:
    """`json_schema_extra` of a field or a model: these rules."""
    return {RULES: list(entries)}


def remedy(text: str) -> dict[str, Any]:
    """`json_schema_extra` of a numeric field with ge/le: the remedy that ends its message."""
    return {REMEDY: text}


def text(literal: str) -> str:
    """Return a CEL string literal."""
    escaped = literal.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def bounds(field: str, low: int | None, high: int | None, how_to_fix: str) -> dict[str, Any]:
    """Return the rule of a numeric field with `ge` and `le`. It has our message instead of the server's."""
    if low is not None and high is not None:
        expression, expected = f"self >= {low} && self <= {high}", f"{low} to {high}"
    elif low is not None:
        expression, expected = f"self >= {low}", f"at least {low}"
    else:
        expression, expected = f"self <= {high}", f"at most {high}"
    message = text(f"{field} must be {expected}, got %d: {how_to_fix}")
    return rule(expression, message_expression=f"{message}.format([self])")


_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?"
)
_SUFFIXES: dict[str, Decimal] = {
    **{s: Decimal(1024) ** (i + 1) for i, s in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
    **{s: Decimal(1000) ** (i + 1) for i, s in enumerate(("k", "M", "G", "T", "P", "E"))},
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
}

_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_UNIT_SECONDS = {
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
}


def size_text(size_bytes: int | None) -> str:
    """Return a size for people, with one decimal and a binary unit: 6729440 is "6.4 MiB". None is "-"."""
    if size_bytes is None:
        return "-"
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.1f} {units[0]}"


def parse_quantity_bytes(text: str) -> int:
    """Bytes of a quantity ("20Gi", "500M", "1e9", "1024"), rounded up. Raises ConfigError."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"quantity {text!r} cannot be read: expected a number of bytes with an optional suffix "
            "(Ki, Mi, Gi, Ti, k, M, G, T), for example 20Gi"
        )
    number, suffix = Decimal(match[1]), match[2] or ""
    scale = _SUFFIXES[suffix] if suffix in _SUFFIXES else Decimal(f"1{suffix}")
    return int((number * scale).to_integral_value(rounding="ROUND_CEILING"))


def parse_duration(text: str) -> timedelta:
    """Parse a Go duration of hours, minutes and seconds ("1h", "90m30s"), to the microsecond.

    Raises ConfigError for anything else, a sign and a bare number included.
    """
    parts = list(_DURATION_PART.finditer(text))
    if not parts or "".join(p[0] for p in parts) != text:
        raise ConfigError(
            f"duration {text!r} cannot be read: expected numbers with units h, m, s or ms, "
            "for example 1h or 90m30s"
        )
    try:
        seconds = sum((Decimal(p[1]) * _UNIT_SECONDS[p[2]] for p in parts), Decimal(0))
        return timedelta(microseconds=int(seconds * 1_000_000))
    except OverflowError as error:
        raise ConfigError(f"duration {text!r} is too long for a timedelta") from error


def _checked(parse: Callable[[str], object]) -> AfterValidator:
    def check(text: str) -> str:
        try:
            parse(text)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return text

    return AfterValidator(check)


QUANTITY = _checked(parse_quantity_bytes)
"""Validator that refuses text which `parse_quantity_bytes` cannot read. The model keeps the user's text."""
DURATION = _checked(parse_duration)
"""Validator that refuses text which `parse_duration` cannot read. The model keeps the user's text."""


def quantity_rule(field: str, example: str) -> dict[str, Any]:
    """CEL: the text is a quantity of at least 1Mi. "20m" is 20 thousandths of a byte."""
    return rule(
        "isQuantity(self) && quantity(self).compareTo(quantity('1Mi')) >= 0",
        message_expression=(
            f'\'{field} is "%s", expected a quantity of bytes of at least 1Mi (m stands for a '
            f"thousandth): write for example {example}'.format([self])"
        ),
    )


def duration_within(shortest: str, longest: str) -> str:
    """Return the CEL expression that `self` is a duration between two others."""
    return (
        r"self.matches('^([0-9]+(\\.[0-9]+)?(ms|s|m|h))+$')"
        f" && duration(self) >= duration('{shortest}') && duration(self) <= duration('{longest}')"
    )


def duration_rule(field: str, example: str) -> dict[str, Any]:
    """CEL: the text is a duration above zero."""
    return rule(
        r"self.matches('^([0-9]+(\\.[0-9]+)?(ms|s|m|h))+$') && self.matches('[1-9]')",
        message_expression=(
            f'\'{field} is "%s", expected a duration above zero with units h, m, s or ms: write '
            f"for example {example}'.format([self])"
        ),
    )
