"""Marks that the models put on their fields and that `schema.py` turns into a CRD's validations.

A rule lives beside the field that it guards. Every message names the field, the value and the
remedy: people read it in the terminal in which they ran `kubectl apply`.
"""

from __future__ import annotations

from typing import Any

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
