"""What each tenant occupies and what it got: bytes against its quota, tokens hit and missed.

A tenant is a text that a client chooses, so that the number of accounts is bounded. Past the bound the account that
holds nothing and was idle longest gives way to a new tenant; its counts go to ``folded``, so that sums over all tenants
stay true. Where every account holds something, new tenants store into one account that they share
(``OVERFLOW_TENANT``), under the quota of tenants without a quota of their own. Nobody is refused for want of an
account: a lookup goes without.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Final

OVERFLOW_TENANT: Final = "antiphon.overflow"
"""Name of the shared account: no client's tenant (``core.tenants``)."""


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
    """One tenant, or all that share the overflow account.

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
        num_accounts_max: accounts kept, those of ``own`` and the shared one not counted.
        quota_of: a tenant's quota in bytes, or None.
        own: tenants that have an account of their own whatever the bound says: those with a quota.
    """

    __slots__ = ("_num_accounts_max", "_num_bounded", "_own", "_quota_of", "accounts", "folded")

    def __init__(self, num_accounts_max: int, quota_of: Callable[[str], int | None], own: Set[str]) -> None:
        self.accounts: dict[str, Account] = {}
        self.folded = TokenCounts()
        self._num_accounts_max = num_accounts_max
        self._num_bounded = 0
        self._quota_of = quota_of
        self._own = own

    def open(self, name: str) -> Account:
        """The account that a store of the tenant counts against, made if there is none."""
        account = self.accounts.pop(name, None)
        if account is None:
            if not self._has_room(name) and not self._fold_one():
                return self.open(OVERFLOW_TENANT)
            account = Account(name, self._quota_of(name))
            self._num_bounded += self._is_bounded(name)
        self.accounts[name] = account
        return account

    def counts_of(self, name: str) -> TokenCounts:
        """Where a lookup of the tenant is counted: ``folded`` where it has no account and there is no free one."""
        return self.open(name).counts if name in self.accounts or self._has_room(name) else self.folded

    def _is_bounded(self, name: str) -> bool:
        return name != OVERFLOW_TENANT and name not in self._own

    def _has_room(self, name: str) -> bool:
        return self._num_bounded < self._num_accounts_max or not self._is_bounded(name)

    def _fold_one(self) -> bool:
        """Folds the account that was idle longest. Returns whether there was one that holds nothing."""
        for account in self.accounts.values():
            if account.used_bytes == 0 and self._is_bounded(account.name):
                self.folded.add(account.counts)
                del self.accounts[account.name]
                self._num_bounded -= 1
                return True
        return False

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._num_bounded == sum(map(self._is_bounded, self.accounts)) <= self._num_accounts_max
        for name, account in self.accounts.items():
            assert account.name == name
            assert account.used_bytes >= 0
            assert account.quota_bytes is None or account.used_bytes <= account.quota_bytes, f"{name} is over its quota"
