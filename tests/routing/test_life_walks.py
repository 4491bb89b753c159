"""Random walks: whatever a shell tells, in whatever order, a life ends once and leaves no counter behind."""

from __future__ import annotations

from random import Random

import pytest

from antiphon.routing.ask import Ask, Prompt
from antiphon.routing.commands import CancelUpstream, ConnectDecode, ConnectPrefill, Finish, ProbeDecode, SendDecode
from antiphon.routing.events import (
    BytesWritten,
    ClientLeft,
    Connected,
    ConnectRefused,
    Deadline,
    DecodeRefused,
    Event,
    FirstByte,
    PrefillAnswered,
    PrefillHead,
    Received,
    StreamEnded,
    UpstreamLost,
)
from antiphon.routing.fleet import Fleet
from antiphon.routing.life import Life
from antiphon.routing.machine import step
from antiphon.routing.options import FleetOptions, LifeOptions
from antiphon.routing.policies import POLICIES

STEPS_MAX = 400


def an_event(chance: Random, attempt: int) -> Event:
    number = max(0, attempt - (chance.random() < 0.15))
    kind = chance.randrange(14)
    if kind < 4:
        return Connected(number)
    if kind == 4:
        return ConnectRefused(number, chance.random() < 0.2)
    if kind == 5:
        return PrefillHead(number)
    if kind == 6:
        status = chance.choice((200, 200, 200, 400, 429, 500, 503))
        return PrefillAnswered(number, status, chance.choice((None, b"{}", b"{}")), chance.choice(("", "p#1", "p#2")))
    if kind == 7:
        return DecodeRefused(number, chance.choice((400, 429, 500, 503)))
    if kind == 8:
        return FirstByte(number)
    if kind == 9:
        return StreamEnded(number, chance.random() < 0.7, chance.random() < 0.2)
    if kind == 10:
        return UpstreamLost(number, chance.random() < 0.3)
    if kind == 11 and chance.random() < 0.3:
        return ClientLeft()
    return chance.choice((BytesWritten(number), Deadline()))


def an_ask(chance: Random, index: int) -> Ask | None:
    prompt = Prompt(b"", b"x" * chance.choice((10, 1000)), chance.randint(0, 300))
    return chance.choice((None, Ask(index), Ask(index, prompt)))


def disturb(fleet: Fleet, chance: Random, now_s: float) -> None:
    """An operator, or a health check."""
    endpoint = chance.choice(fleet.all())
    pool = fleet.pool(endpoint.role)
    what = chance.randrange(8)
    if what == 0:
        pool.drain(endpoint)
    elif what == 1:
        pool.health_refused(endpoint, now_s, 0.5)
    elif what == 2:
        pool.health_failed(endpoint, now_s, 0.5)
    elif what == 3 and len(pool.endpoints) > 1:
        pool.remove(endpoint)
    elif what == 4:
        pool.open(endpoint)
    else:
        pool.health_succeeded(endpoint, now_s)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_walk_ends_once_and_leaves_nothing(policy: str) -> None:
    ends = 0
    for seed in range(120):
        chance = Random(f"{policy} {seed}")
        options = FleetOptions(prefill_policy=policy, decode_policy=policy, prefers_warm_pairs=chance.random() < 0.5)
        urls = [f"http://{index}:1" for index in range(4)]
        fleet = Fleet(urls[: chance.randint(1, 3)], urls[: chance.randint(1, 3)], options)
        life_options = LifeOptions(prefill_fallback=chance.choice(("fail", "local")))
        lives = [
            Life(f"r{index}", fleet, life_options, path=chance.choice(("pd", "pd", "local")), ask=an_ask(chance, index))
            for index in range(3)
        ]
        now_s, finishes, open_attempts = 0.0, dict.fromkeys(lives, 0), dict.fromkeys(lives, 0)
        for number in range(STEPS_MAX):
            running = [life for life in lives if not life.is_over]
            if not running:
                break
            life = chance.choice(running)
            if number > STEPS_MAX // 2 or chance.random() < 0.1:
                now_s = max(now_s, min(life.deadline_s, now_s + 1000))
                event: Event = Deadline()
            else:
                now_s += chance.random()
                event = an_event(chance, life.attempt)
            if life.attempt == 0:
                event = Received()
            for command in step(life, event, now_s, chance.random()):
                assert not finishes[life], "a command after the end"
                if isinstance(command, ProbeDecode | ConnectPrefill | ConnectDecode):
                    open_attempts[life] = command.attempt
                elif isinstance(command, CancelUpstream | SendDecode):
                    assert command.attempt == open_attempts[life], "a command for another attempt"
                finishes[life] += isinstance(command, Finish)
            life.validate()
            if chance.random() < 0.1:
                disturb(fleet, chance, now_s)
            fleet.validate()
        assert set(finishes.values()) == {1}
        assert all(not endpoint.num_active and not endpoint.trial for endpoint in fleet.all())
        assert all(not endpoint.num_uncached_tokens for endpoint in fleet.all())
        ends += len(lives)
    assert ends == 360
