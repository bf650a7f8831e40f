"""What looks like a credential: names of fields and headers, and the schemes that stand before one.

A name or a value enters; whether it probably holds a secret leaves. Two questions are asked,
each as strict as its answer's use allows: what to show, and what part of a secret is the secret.
"""

from __future__ import annotations

import re
from functools import lru_cache

_SCHEMES = "basic|bearer|digest|negotiate"

# in free text: the scheme, the gap, and what follows, which is a credential only where it looks so
SCHEME_AND_TOKEN = re.compile(
    rf"\b({_SCHEMES}|token|apikey|aws4-hmac-sha256)([ \t]{{1,4}})([A-Za-z0-9._~+/=:-]{{8,8192}})",
    re.IGNORECASE,
)
# at the beginning of a secret's value: it tells nothing
SCHEME = re.compile(
    rf"({_SCHEMES}|ssws|aws4-\S{{1,20}}|[a-z0-9-]{{0,20}}(auth|hmac|key|token)[a-z0-9-]{{0,9}})"
    r" +(?=\S)",
    re.IGNORECASE,
)

_TELLING = (
    "token",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "apikey",
    "signature",
    "credential",
    "session",
    "authorization",
    "privatekey",
    "accesskey",
)
_NAMES = frozenset(
    {"cookie", "setcookie", "auth", "pwd", "jwt", "bearer", "xcsrf", "cvc", "cvv", "otp"}
)


def is_telling(name: object) -> bool:
    """Whether a header, field or parameter of this name probably holds a secret."""
    return _is_telling(str(name)[:200])


@lru_cache(maxsize=2048)
def _is_telling(name: str) -> bool:
    flat = re.sub(r"[^a-z0-9]", "", name.lower())
    return flat in _NAMES or any(word in flat for word in _TELLING)
