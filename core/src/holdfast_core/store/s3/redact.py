"""Removal of credentials from a store's texts before they reach a log, a condition or an error.

A store receives the access key and the session token. A hostile store may repeat them as they are, in
parts, encoded, or with other characters in between. Long words that look like a key are removed as well,
because no list of encodings is complete.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable

_REMOVED = "***"
_SHORTEST_SECRET = 6
"""Shorter strings are not secrets, and to remove them would remove ordinary words."""
_GRAM = 8
"""If the text and a secret have this many consecutive letters and digits in common, they are removed."""
_OPAQUE = re.compile(r"[A-Za-z0-9+/=_~.%-]{20,}")
"""A word that may be a key."""


def redact(text: str, secrets: Iterable[str]) -> str:
    """Return the text without the secrets, parts of them, and long words that look like a key.

    Case and characters other than letters and digits are ignored when the text is searched.
    """
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
    """Return the text with these spans, sorted and possibly overlapping, replaced by _REMOVED."""
    found: list[str] = []
    done = 0
    for start, stop in spans:
        if start >= done:
            found += (text[done:start], _REMOVED)
        done = max(done, stop)
    return "".join(found) + text[done:]


def _without_key(match: re.Match[str]) -> str:
    """Return _REMOVED for a word with digits, lower-case and upper-case letters, else the word.

    Keys have all three kinds of characters; paths, names and hex digests usually do not.
    """
    word = match.group()
    kinds = (str.isdigit, str.islower, str.isupper)
    return _REMOVED if all(any(map(kind, word)) for kind in kinds) else word


def _forms(secret: str) -> Iterable[str]:
    """Return the secret, reversed, in hex and in Base64, as case-folded letters and digits."""
    raw = secret.encode()
    yield _letters(secret)
    yield _letters(secret[::-1])
    yield raw.hex()
    for skipped in range(3):
        # Within a longer Base64 text the form of a secret depends on the number of bytes before it.
        whole = raw[skipped : len(raw) - (len(raw) - skipped) % 3]
        yield _letters(base64.b64encode(whole).decode())


def _letters(text: str) -> str:
    return "".join(c.casefold()[:1] for c in text if c.isalnum())
