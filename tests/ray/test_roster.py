"""Which engines the router is told of: beats, leaving, and replicas that are gone."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from antiphon.ray.roster import BEAT_LOST_S, LEFT_MAX, Roster


def info(url: str = "http://127.0.0.1:1", life: str = "a", role: str = "decode", **shape: Any) -> dict[str, Any]:
    return {"name": f"{role}-{life}", "role": role, "url": url, "incarnation": life, "shape": shape}


def test_a_beat_adds_once_and_another_life_replaces() -> None:
    roster = Roster()
    assert roster.beat(info(), 0.0) == ("new", None)
    assert roster.beat(info(), 1.0) == ("known", None)
    standing, replaced = roster.beat(info(life="b"), 2.0)
    assert standing == "new"
    assert replaced is not None
    assert replaced.incarnation == "a"
    assert [entry.incarnation for entry in roster.entries.values()] == ["b"]


def test_what_has_left_does_not_come_back() -> None:
    roster = Roster()
    roster.beat(info(), 0.0)
    assert roster.leave(info()) is not None
    assert roster.leave(info()) is None
    assert roster.beat(info(), 1.0) == ("left", None)
    assert roster.beat(info(life="b"), 1.0)[0] == "new"
    assert roster.leave(info()) is None, "the earlier life does not take the later one with it"
    assert list(roster.entries) == ["http://127.0.0.1:1"]
    for number in range(LEFT_MAX + 1):
        roster.leave(info(life=f"x{number}"))
    roster.validate()


def test_without_beats_an_engine_is_lost() -> None:
    roster = Roster()
    roster.beat(info(), 0.0)
    roster.beat(info("http://127.0.0.1:2", "b"), 5.0)
    assert roster.lost(BEAT_LOST_S) == []
    assert [entry.incarnation for entry in roster.lost(BEAT_LOST_S + 0.1)] == ["a"]
    assert list(roster.entries) == ["http://127.0.0.1:2"]


def test_who_was_stopped_meanwhile_has_lost_nobody() -> None:
    """The process of the router's replica stood still: the beats of that time lie unread."""
    roster = Roster()
    roster.beat(info(), 0.0)
    assert roster.lost(1.0) == []
    assert roster.lost(60.0) == []
    roster.beat(info(), 60.1)
    for second in range(61, 70):
        assert roster.lost(float(second)) == []
    assert [entry.incarnation for second in range(70, 73) for entry in roster.lost(float(second))] == ["a"]


def test_engines_that_cannot_hand_over_are_named() -> None:
    roster = Roster()
    roster.beat(info(life="d", role="decode", dtype="float32", model="m"), 0.0)
    other = "http://127.0.0.1:2"
    assert roster.admit(info(other, "p", "prefill", dtype="float32", model="m"), 0.0, 0.0).fits
    assert roster.admit(info(other, "p", "prefill", dtype="float16", model="m"), 0.0, 0.0).misfit == (
        "dtype is 'float16', but 'float32' in decode-d"
    )
    assert roster.admit(info(other, "e", "decode", dtype="float16", model="m"), 0.0, 0.0).fits


def built(number: int, life: str, role: str, model: str = "m") -> dict[str, Any]:
    return info(f"http://127.0.0.1:{number}", life, role, model=model) | {"built_s": float(number // 10)}


def test_a_later_build_takes_over_when_both_of_its_roles_are_there() -> None:
    roster = Roster()
    for each in (built(11, "p1", "prefill"), built(12, "d1", "decode"), built(13, "e1", "decode")):
        assert roster.admit(each, 1.0, 0.0).fits
        roster.beat(each, 0.0)
    new_d, new_p = built(21, "d2", "decode", "other"), built(22, "p2", "prefill", "other")
    assert "the router is replaced first" in str(roster.admit(new_d, 1.0, 1.0).waits)
    assert "until a prefill engine" in str(roster.admit(new_d, 2.0, 1.0).waits)
    assert len(roster.entries) == 3, "those of the earlier build serve meanwhile"
    verdict = roster.admit(new_p, 2.0, 2.0)
    assert verdict.fits
    assert {entry.incarnation for entry in verdict.replaced} == {"p1", "d1", "e1"}
    roster.beat(new_p, 2.0)
    assert roster.admit(new_d, 2.0, 2.0).fits
    roster.beat(new_d, 2.0)
    assert roster.beat(built(12, "d1", "decode"), 3.0)[0] == "left", "it does not come back"
    late = roster.admit(built(14, "f1", "decode"), 2.0, 3.0)
    assert "deployed later" in str(late.misfit)
    roster.validate()


def test_a_later_build_of_the_same_shape_serves_beside_the_earlier_one() -> None:
    roster = Roster()
    roster.beat(built(11, "p1", "prefill"), 0.0)
    assert roster.admit(built(21, "d2", "decode"), 1.0, 0.0).fits
    assert roster.waiting == {}


def test_who_waits_and_is_gone_counts_no_more() -> None:
    roster = Roster()
    for each in (built(11, "p1", "prefill"), built(12, "d1", "decode")):
        roster.beat(each, 0.0)
    roster.admit(built(22, "p2", "prefill", "other"), 2.0, 0.0)
    for second in range(0, 14, 2):
        roster.beat(built(11, "p1", "prefill"), float(second))
        roster.beat(built(12, "d1", "decode"), float(second))
        assert roster.lost(float(second)) == []
    assert roster.waiting == {}
    assert roster.admit(built(21, "d2", "decode", "other"), 2.0, 14.0).waits


steps = st.lists(
    st.tuples(st.sampled_from(["beat", "leave", "wait"]), st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)),
    max_size=60,
)


@given(steps)
def test_a_roster_is_the_last_life_of_each_address_that_was_heard_of(moves: list[tuple[str, int, int, int]]) -> None:
    roster, now_s = Roster(), 0.0
    heard: dict[str, tuple[str, float]] = {}
    gone: set[str] = set()
    for what, where, life, seconds in moves:
        url, name = f"http://127.0.0.1:{where + 1}", f"{where}.{life}"
        if what == "beat":
            roster.beat(info(url, name), now_s)
            if name not in gone:
                heard[url] = name, now_s
        elif what == "leave":
            roster.leave(info(url, name))
            gone.add(name)
            if heard.get(url, ("",))[0] == name:
                del heard[url]
        else:
            now_s += seconds
            roster.lost(now_s)
            heard = {key: value for key, value in heard.items() if now_s - value[1] <= BEAT_LOST_S}
        roster.validate()
        assert {key: entry.incarnation for key, entry in roster.entries.items()} == {
            key: value[0] for key, value in heard.items()
        }
