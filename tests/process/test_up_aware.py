"""A deployment by ``antiphon up`` whose router goes by what its engines hold, admits cold prompts by bytes and knows
tenants: that the parts find each other, on simulated engines whose tokens prove their KV.

Out of scope: how good the choices are (tests/routing, tests/sim), and real engines (tests/real).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.deployment import Deployment
from tests.router.stack import Answer, ask, quiet_ports, wait_for

pytestmark = pytest.mark.process

TENANTS = """
in_flight_max: 32
tenants:
  - {name: one, api_key_files: [one.key]}
  - {name: two, api_key_files: [two.key]}
"""
KNOBS = "policy: kv_aware, local_max_tokens: {local}, tenants_file: {folder}/tenants.yaml, kv_events_port: {port}, "
KNOBS += "kv_bytes_per_token: 131072, cold_min_bytes: 20000000"
LOCAL_TOKENS = 64
COLD_TOKENS = 20_000_000 // 131_072
KEYS = {"one": "the-key-of-one", "two": "the-key-of-two"}


class Aware:
    """One deployment, and its clients."""

    def __init__(self, folder: Path, preexec: Callable[[], None]) -> None:
        (folder / "tenants.yaml").write_text(TENANTS)
        for tenant, key in KEYS.items():
            (folder / f"{tenant}.key").write_text(f"{key}\n")
        self.up = Deployment(
            folder, preexec, knobs=KNOBS.format(folder=folder, local=LOCAL_TOKENS, port=quiet_ports(1))
        )

    def complete(self, prompt: str, tenant: str = "one", **fields: Any) -> Answer:
        body = {"prompt": prompt, "max_tokens": 8} | fields
        headers = {"Authorization": f"Bearer {KEYS.get(tenant, 'no-key')}"}
        return ask(self.up.router_port, "POST", "/v1/completions", body, headers)

    def told(self, path: str) -> Any:
        answer = self.up.ask("GET", path)
        assert answer.status == 200, answer.body
        return answer.json

    def receipt(self, answer: Answer) -> dict[str, Any]:
        found: dict[str, Any] = self.told(f"/receipts/{answer.headers['x-antiphon-receipt']}?wait_s=5")
        return found

    def blocks(self, address: str) -> int:
        """KV blocks that the router knows an engine to hold."""
        num: int = self.told("/status")["whereabouts"]["kv_events"]["blocks"].get(address, 0)
        return num

    def wait_heard(self) -> None:
        """Wait until every engine has been heard: what one says before its socket has found the router's is missed
        until it says something more."""
        numbers = itertools.count()

        def is_heard() -> bool:
            self.complete(prompt_of(f"begin{next(numbers)}", 2 * LOCAL_TOKENS))
            return len(self.told("/status")["whereabouts"]["kv_events"]["blocks"]) == 4

        wait_for(is_heard, "every engine has told of its blocks", 20.0)

    def wait_known(self, receipt: dict[str, Any], num_tokens: int) -> None:
        """Wait until the router knows that the decode engine of a request holds the whole blocks of its prompt."""
        what = f"the decode engine has told of {num_tokens} tokens"
        wait_for(lambda: self.blocks(receipt["decode"]) >= (num_tokens - 1) // 16, what)


@pytest.fixture(scope="module")
def aware(tmp_path_factory: pytest.TempPathFactory, die_with_parent: Callable[[], None]) -> Iterator[Aware]:
    found = Aware(tmp_path_factory.mktemp("aware"), die_with_parent)
    try:
        found.up.wait_ready()
        found.wait_heard()
        yield found
    finally:
        assert found.up.stop() == 0


def prompt_of(word: str, num_tokens: int) -> str:
    return (f"{word} " * num_tokens)[: 4 * num_tokens]


def test_what_a_decode_engine_holds_is_not_computed_again(aware: Aware) -> None:
    prompt = prompt_of("held", 400)
    first = aware.complete(prompt)
    assert first.status == 200, first.body
    began = aware.receipt(first)
    assert (began["path"], began["tenant"]) == ("pd", "one")
    num_tokens = began["tokens"]["prompt"]
    assert num_tokens > 3 * LOCAL_TOKENS
    aware.wait_known(began, num_tokens)

    second = aware.complete(prompt)
    held = aware.receipt(second)
    assert second.text == first.text
    assert (held["path"], held["prefill"], held["decode"]) == ("cached", None, began["decode"])
    assert held["num_held_tokens"] >= num_tokens - LOCAL_TOKENS

    # With as much again to compute it goes through prefill, on the engine that holds the beginning.
    longer = prompt + prompt_of("more", 400)
    grown = aware.receipt(aware.complete(longer))
    assert (grown["path"], grown["prefill"]) == ("pd", began["prefill"])
    assert grown["tokens"]["by_source"]["device"] >= (num_tokens - 1) // 16 * 16


def test_a_short_prompt_needs_no_prefill_engine(aware: Aware) -> None:
    short = aware.receipt(aware.complete("three words here"))
    assert (short["path"], short["prefill"]) == ("local", None)


def test_what_one_tenant_has_computed_helps_no_other(aware: Aware) -> None:
    prompt = prompt_of("mine", 400)
    first = aware.receipt(aware.complete(prompt, "one"))
    num_tokens = first["tokens"]["prompt"]
    aware.wait_known(first, num_tokens)
    other = aware.receipt(aware.complete(prompt, "two"))
    assert (other["path"], other["tenant"]) == ("pd", "two")
    assert other["tokens"]["by_source"] == {"device": 0, "computed": num_tokens}
    assert aware.complete(prompt, "three").status == 401


def test_cold_prompts_of_two_tenants_are_admitted_by_bytes(aware: Aware) -> None:
    """Each is cold; every one is answered, and the books are empty afterwards."""
    before = aware.told("/status")["cold_admission"]
    assert before["is_on"]
    answers: dict[int, Answer] = {}

    def one(number: int) -> None:
        prompt = prompt_of(f"cold{number}", 4 * COLD_TOKENS)
        answers[number] = aware.complete(prompt, ("one", "two")[number % 2], stream=number % 4 == 0)

    clients = [threading.Thread(target=one, args=(number,)) for number in range(12)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(30)
    assert [answers[number].status for number in range(12)] == [200] * 12
    alone = aware.complete(prompt_of("cold7", 4 * COLD_TOKENS), "two")
    assert alone.text == answers[7].text

    def settled() -> dict[str, Any] | None:
        shown: dict[str, Any] = aware.told("/status")["cold_admission"]
        return shown if not shown["committed_bytes"] and not shown["num_waiting"] else None

    after = wait_for(settled, "nothing is admitted and not pulled")
    admitted = [name for name in after["counts"] if name.startswith("admitted_") and name != "admitted_warm"]
    assert sum(after["counts"][name] - before["counts"][name] for name in admitted) >= 12
    assert after["counts"]["admitted_from_queue"] > before["counts"]["admitted_from_queue"]
    # Each engine has 4096 blocks of 16 tokens, and says how many are free.
    free = {row["url"]: row["free_kv_bytes"] for row in after["decodes"]}
    assert len(free) == 2
    assert all(num is not None and 0 < num <= 4096 * 16 * 131_072 for num in free.values())


def test_an_engine_that_has_lost_its_kv_answers_right(aware: Aware) -> None:
    prompt = prompt_of("lost", 400)
    first = aware.complete(prompt)
    began = aware.receipt(first)
    aware.wait_known(began, began["tokens"]["prompt"])
    port = int(began["decode"].rpartition(":")[2])
    assert ask(port, "POST", "/reset_prefix_cache", {}).json == {"success": True}
    again = aware.complete(prompt)
    assert again.text == first.text
    wait_for(lambda: aware.receipt(aware.complete(prompt))["path"] == "cached", "what it computes is known again")
