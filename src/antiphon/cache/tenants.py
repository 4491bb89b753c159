"""What each tenant occupies and what it got: bytes against its quota, tokens hit and missed.

A tenant is a text that a client chooses, so that the number of accounts is bounded. Past the bound the account that
holds nothing and was idle longest gives way to a new tenant; its counts go to ``folded``, so that sums over all tenants
stay true. Where every account holds something, new tenants store into one account that they share
(``OVERFLOW_TENANT``), under the quota of tenants without a quota of their own. Nobody is refused for want of an
account: a lookup goes without. A tenant that was given a quota of its own has an account of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from antiphon.cache.options import CacheOptions
from antiphon.core.errors import CapacityExceeded

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
        lowered_from_bytes: what it occupied when its quota was lowered below that; it never occupies more again.
    """

    name: str
    quota_bytes: int | None
    used_bytes: int = 0
    lowered_from_bytes: int = 0
    counts: TokenCounts = field(default_factory=TokenCounts)


class Tenants:
    """The accounts, in the order of their last use.

    Args:
        options: the bounds, and the quotas at the start.
    """

    __slots__ = ("_given", "_num_bounded", "_options", "_own", "accounts", "folded", "quotas")

    def __init__(self, options: CacheOptions) -> None:
        self.accounts: dict[str, Account] = {}
        self.folded = TokenCounts()
        self.quotas: dict[str, int] = dict(options.quota_bytes)
        """Bytes that a tenant may occupy, of those that have a quota of their own."""
        self._options = options
        self._num_bounded = 0
        self._own = options.quota_bytes.keys() | options.own_tenants
        self._given: dict[str, None] = {}
        """Further tenants with an account whatever the bound says: they were given a quota since, the oldest first."""

    def open(self, name: str) -> Account:
        """The account that a store of the tenant counts against, made if there is none."""
        account = self.accounts.pop(name, None)
        if account is None:
            if not self._has_room(name) and not self._fold_one():
                return self.open(OVERFLOW_TENANT)
            account = Account(name, self.quota_of(name))
            self._num_bounded += self._is_bounded(name)
        self.accounts[name] = account
        return account

    def counts_of(self, name: str) -> TokenCounts:
        """Where a lookup of the tenant is counted: ``folded`` where it has no account and there is no free one."""
        return self.open(name).counts if name in self.accounts or self._has_room(name) else self.folded

    def quota_of(self, name: str) -> int | None:
        """Bytes that the tenant may occupy; None means no quota."""
        return self.quotas.get(name, self._options.default_quota_bytes)

    def set_quota(self, name: str, quota_bytes: int | None) -> Account:
        """The tenant's account, with that quota from here on; None: that of tenants without one of their own.

        Nothing is evicted here, so that it may occupy more.

        Raises:
            CapacityExceeded: as many other tenants as may were given a quota.
        """
        if quota_bytes is None:
            self.quotas.pop(name, None)
        else:
            self._take_on(name)
            self.quotas[name] = quota_bytes
        account = self.open(name)
        account.quota_bytes = self.quota_of(account.name)
        return account

    def _take_on(self, name: str) -> None:
        """The tenant has an account of its own from here on."""
        if not self._is_bounded(name):
            return
        if len(self._given) >= self._options.quotas_max and not self._let_go():
            raise CapacityExceeded(
                f"{len(self._given)} tenants were given a quota, and no more may be",
                remedy="take the quota of another tenant away; its place is free when it holds nothing",
            )
        self._num_bounded -= name in self.accounts
        self._given[name] = None

    def _let_go(self) -> bool:
        """Frees the place of a tenant whose quota was taken away and that holds nothing; whether there is one."""
        for name in self._given:
            account = self.accounts.get(name)
            if name not in self.quotas and (account is None or not account.used_bytes):
                del self._given[name]
                if account is not None:
                    self.folded.add(account.counts)
                    del self.accounts[name]
                return True
        return False

    def _is_bounded(self, name: str) -> bool:
        return name != OVERFLOW_TENANT and name not in self._own and name not in self._given

    def _has_room(self, name: str) -> bool:
        return self._num_bounded < self._options.tenants_max or not self._is_bounded(name)

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
        assert self._num_bounded == sum(map(self._is_bounded, self.accounts)) <= self._options.tenants_max
        assert len(self._given) <= self._options.quotas_max
        assert self.quotas.keys() <= self._own | self._given.keys(), "a tenant with a quota shares its account"
        for name, account in self.accounts.items():
            assert account.name == name
            assert account.used_bytes >= 0
            assert account.quota_bytes == self.quota_of(name), f"{name} is held to another quota than its own"
            assert account.quota_bytes is None or account.used_bytes <= max(
                account.quota_bytes, account.lowered_from_bytes
            ), f"{name} is over its quota"
