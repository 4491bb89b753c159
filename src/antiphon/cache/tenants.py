"""What each tenant occupies and what it got: bytes against its quota, tokens hit and missed.

The number of accounts is bounded. An account that holds nothing and was idle longest gives way to a new tenant; its
counts go to ``folded``, so that sums over all tenants stay true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from antiphon.core.errors import CapacityExceeded


@dataclass(slots=True)
class TokenCounts:
    """Tokens of one tenant, and chunks that its stores were given or refused."""

    hit_tokens: int = 0
    miss_tokens: int = 0
    stored_tokens: int = 0
    evicted_tokens: int = 0
    refused_tokens: int = 0

    def add(self, other: TokenCounts) -> None:
        """Adds ``other`` to this."""
        self.hit_tokens += other.hit_tokens
        self.miss_tokens += other.miss_tokens
        self.stored_tokens += other.stored_tokens
        self.evicted_tokens += other.evicted_tokens
        self.refused_tokens += other.refused_tokens


@dataclass(slots=True, eq=False)
class Account:
    """One tenant.

    Args:
        quota_bytes: bytes that it may occupy; None means no quota.
        used_bytes: bytes of its regions, retired and quarantined ones too.
    """

    name: str
    quota_bytes: int | None
    used_bytes: int = 0
    counts: TokenCounts = field(default_factory=TokenCounts)


class Tenants:
    """The accounts, in the order of their last use.

    Args:
        num_accounts_max: accounts kept.
        quota_of: a tenant's quota in bytes, or None.
    """

    __slots__ = ("_num_accounts_max", "_quota_of", "accounts", "folded")

    def __init__(self, num_accounts_max: int, quota_of: Callable[[str], int | None]) -> None:
        self.accounts: dict[str, Account] = {}
        self.folded = TokenCounts()
        self._num_accounts_max = num_accounts_max
        self._quota_of = quota_of

    def open(self, name: str) -> Account:
        """The tenant's account, made if it has none.

        Raises:
            CapacityExceeded: there are as many accounts as allowed, and all of them hold bytes.
        """
        account = self.accounts.pop(name, None)
        if account is None:
            if len(self.accounts) >= self._num_accounts_max:
                self._fold_one()
            account = Account(name, self._quota_of(name))
        self.accounts[name] = account
        return account

    def _fold_one(self) -> None:
        idle = next((account for account in self.accounts.values() if account.used_bytes == 0), None)
        if idle is None:
            raise CapacityExceeded(
                f"{len(self.accounts)} tenants hold chunks, and no more are kept",
                remedy="raise tenants_max, or clear tenants that are gone",
            )
        self.folded.add(idle.counts)
        del self.accounts[idle.name]

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self.accounts) <= self._num_accounts_max
        for name, account in self.accounts.items():
            assert account.name == name
            assert account.used_bytes >= 0
            assert account.quota_bytes is None or account.used_bytes <= account.quota_bytes, f"{name} is over its quota"
