"""Whose chunks are whose: the tenant of a request, made in one way by engines, cache servers and people's commands.

Always true: salts that differ have tenants that differ, and no salt has a name that Antiphon uses itself. A salt that
cannot be a name (or is one of those) is named by a digest.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

NO_TENANT: Final = "default"
"""Tenant of requests without a ``cache_salt``."""

DIGEST_LETTERS: Final = 16

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OWN = re.compile(r"default|antiphon\..*|salt-.*")
_DIGESTED = re.compile(rf"salt-[0-9a-f]{{{DIGEST_LETTERS}}}")


def tenant_of(cache_salt: str | None) -> str:
    """Whose quota a request counts against: its salt where that can be a name, else a digest of it."""
    if not cache_salt:
        return NO_TENANT
    if _NAME.fullmatch(cache_salt) and not _OWN.fullmatch(cache_salt):
        return cache_salt
    digest = hashlib.sha256(cache_salt.encode(errors="surrogatepass")).hexdigest()
    return f"salt-{digest[:DIGEST_LETTERS]}"


def tenant_named(text: str) -> str:
    """The tenant that a person means: by a salt, or by a tenant's name as it is shown.

    ``default`` means the requests without a salt, and ``salt-`` with a digest itself. It may be applied again.
    """
    return text if text == NO_TENANT or _DIGESTED.fullmatch(text) else tenant_of(text)
