"""A hook that fails answers "no reuse", and so does every later one, except those that end what was begun."""

from __future__ import annotations

import logging

import pytest

from antiphon.connector.guarding import guarded


class Hooks:
    out_of_service: str | None = None

    def __init__(self) -> None:
        self.num_calls = 0

    @guarded(lambda: 0)
    def number(self, divisor: int) -> int:
        self.num_calls += 1
        return 12 // divisor

    @guarded(lambda: None, is_always_run=True)
    def end(self, *, fails: bool = False) -> None:
        self.num_calls += 1
        assert not fails, "the end failed"


def test_a_hook_that_works_is_not_touched() -> None:
    hooks = Hooks()
    assert hooks.number(4) == 3
    assert hooks.out_of_service is None


def test_the_first_failure_takes_all_out_of_service(caplog: pytest.LogCaptureFixture) -> None:
    hooks = Hooks()
    with caplog.at_level(logging.ERROR, "antiphon.connector"):
        assert hooks.number(0) == 0
    assert "reuse is off until this engine is restarted: number failed: ZeroDivisionError" in caplog.text
    assert hooks.number(4) == 0
    assert hooks.num_calls == 1


def test_what_ends_things_runs_out_of_service_and_may_fail_too() -> None:
    hooks = Hooks()
    hooks.number(0)
    reason = hooks.out_of_service
    hooks.end()
    hooks.end(fails=True)
    assert hooks.num_calls == 3
    assert hooks.out_of_service == reason, "the first reason counts"


def test_an_interrupt_is_not_held() -> None:
    class Interrupted(Hooks):
        @guarded(lambda: None)
        def hook(self) -> None:
            raise KeyboardInterrupt

    hooks = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        hooks.hook()
    assert hooks.out_of_service is None
