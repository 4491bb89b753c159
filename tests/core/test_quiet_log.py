"""A few lines a cause in 30 seconds."""

from __future__ import annotations

import logging

import pytest

from antiphon.core.quiet_log import CAUSES_MAX, REPEAT_AFTER_S, QuietLog


def test_a_cause_is_said_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [100.0]
    log = QuietLog(logging.getLogger("antiphon.client"), lambda: now_s[0])
    for _ in range(5):
        log.warning("a", "first")
    log.warning("b", "other")
    now_s[0] += REPEAT_AFTER_S
    log.warning("a", "again")
    assert [record.getMessage() for record in caplog.records] == [
        "first",
        "other",
        "again (4 more since the last line)",
    ]


def test_a_cause_may_be_quiet_for_longer(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [100.0]
    log = QuietLog(logging.getLogger("quiet"), lambda: now_s[0], repeat_after_s=60.0)
    for _ in range(4):
        log.warning("a", "first")
        now_s[0] += REPEAT_AFTER_S / 2
    log.warning("a", "again")
    assert [record.getMessage() for record in caplog.records] == ["first", "again (3 more since the last line)"]


def test_a_few_lines_may_be_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now_s = 0.0
    log = QuietLog(logging.getLogger("quiet"), lambda: now_s, num_lines=10)
    for number in range(25):
        log.say(logging.INFO, "faults", "fault %d", number)
    log.info("others", "100%% of %s", "it")
    now_s = REPEAT_AFTER_S + 1
    log.say(logging.INFO, "faults", "fault again")
    assert [record.getMessage() for record in caplog.records] == [
        *(f"fault {number}" for number in range(10)),
        "100% of it",
        "fault again (15 more since the last line)",
    ]


def test_causes_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = QuietLog(logging.getLogger("antiphon.client"), lambda: 0.0)
    for number in range(10 * CAUSES_MAX):
        log.warning(f"cause {number}", "m")
    assert len(log._said) == CAUSES_MAX
    assert len(caplog.records) == 10 * CAUSES_MAX
