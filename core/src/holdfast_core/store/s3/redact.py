"""Remove credentials from what a store says, before it reaches a log, a condition or an error.

A store is sent a session token and an access key, and a hostile one may repeat them: as they are, in
parts, encoded, or with other characters in between. What looks like a key is removed as well, since
no list of encodings is complete.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable

_REMOVED = "***"
_SHORTEST_SECRET = 6
"""Shorter ones are no secrets, and to remove them would remove the words around them."""
_GRAM = 8
"""So many letters and digits in a row that a secret has, too, are a part of it."""
_OPAQUE = re.compile(r"[A-Za-z0-9+/=_~.%-]{20,}")


def redact(text: str, secrets: Iterable[str]) -> str:
    """The text without the secrets, their parts, and long words that look like a key."""
    places = [index for index, character in enumerate(text) if character.isalnum()]
    letters = "".join(text[index].casefold()[:1] for index in places)
    hidden: list[tuple[int, int]] = []
    known = [secret for secret in secrets if len(secret) >= _SHORTEST_SECRET]
    for form in {form for secret in known for form in _forms(secret)}:
        if len(form) < _SHORTEST_SECRET:
            continue
        size = min(_GRAM, len(form))
        grams = {form[start : start + size] for start in range(len(form) - size + 1)}
        hidden += [
            (places[start], places[start + size - 1] + 1)
            for start in range(len(letters) - size + 1)
            if letters[start : start + size] in grams
        ]
    return _OPAQUE.sub(_without_key, _without(text, sorted(hidden)))


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    found: list[str] = []
    done = 0
    for start, stop in spans:
        if start >= done:
            found += (text[done:start], _REMOVED)
        done = max(done, stop)
    return "".join(found) + text[done:]


def _without_key(match: re.Match[str]) -> str:
    """Words of a key have digits, small and capital letters; paths, names and hex digests do not."""
    word = match.group()
    kinds = (str.isdigit, str.islower, str.isupper)
    return _REMOVED if all(any(map(kind, word)) for kind in kinds) else word


def _forms(secret: str) -> Iterable[str]:
    raw = secret.encode()
    yield _letters(secret)
    yield _letters(secret[::-1])
    yield raw.hex()
    for skipped in range(3):
        # The bytes before it shift what a secret looks like within a longer text in Base64.
        whole = raw[skipped : len(raw) - (len(raw) - skipped) % 3]
        yield _letters(base64.b64encode(whole).decode())


def _letters(text: str) -> str:
    return "".join(c.casefold()[:1] for c in text if c.isalnum())
