"""``antiphon demo``: P/D serving on this machine, from nothing to three answered questions.

Prepares the demo model, starts one prefill engine, one decode engine and the router from a spec that it writes down,
asks three questions through the router and shows the receipt of each; then asks a long one twice, with the engines' own
prefix caches emptied in between, so that the second time its KV comes from the cache server. It checks what a sceptic
would: that requests were routed over both engines, that NIXL moved KV for each, that chunks were stored and found
again, and that the decode engine alone gives the same answers.

It owns the order of these steps and the words; every part is the one that production uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from antiphon.config.checks import run_checks
from antiphon.config.compile import Compiled, compile_all
from antiphon.config.facts import gather_facts
from antiphon.config.load import load_spec
from antiphon.config.plan import ProcessPlan
from antiphon.config.problems import SpecError
from antiphon.config.supervisor_spec import default_state_dir
from antiphon.core.errors import StartError
from antiphon.engine import demo_model
from antiphon.engine.vllm import scrape_metrics
from antiphon.protocol.openai import curl_line
from antiphon.supervisor.events import SupervisorEvent
from antiphon.supervisor.report import refuse_second
from antiphon.supervisor.supervisor import StartCancelled, Supervisor
from antiphon.verify.check import Check
from antiphon.verify.questions import LONG_QUESTION, QUESTIONS, Answer, Asker
from antiphon.verify.reuse import Reuse

Say = Callable[[str], None]

NAME = "demo"
METRICS_TIMEOUT_S = 20.0
_COUNTER_DEADLINE_S = 15.0

SPEC = """\
# The deployment that `antiphon demo` starts. Use it as it is: antiphon up --config {path}
name: {name}
model:
  path: {model}
  served_name: {served_name}
  dtype: float32        # bfloat16 rounds differently on prefill and decode: the text could differ from decode alone
  max_model_len: 4096
engine:
  device: cpu
  kv_memory_bytes: 400MB
  max_num_seqs: 16
  dev_mode: true        # for the route that empties an engine's own prefix cache; it listens on this machine only
  args:
    generation-config: vllm
prefill:
  port: {prefill}
  side_channel_port: {prefill_side}
decode:
  port: {decode}
  side_channel_port: {decode_side}
cache:
  port: {cache}
  http_port: {cache_http}
router:
  port: {router}
"""

PORTS = {
    "prefill": 8001,
    "decode": 8101,
    "prefill_side": 5600,
    "decode_side": 5700,
    "cache": 6555,
    "cache_http": 8090,
    "router": 30000,
}
PAIRS = {"cache", "cache_http"}
"""Ports of which the next one is used too: the second cache server's."""
_TRIES_MAX = 100


@dataclass(slots=True)
class Clock:
    """Seconds since the demo began."""

    began_s: float = field(default_factory=time.monotonic)

    def __call__(self) -> float:
        return time.monotonic() - self.began_s


def free_ports(wanted: dict[str, int]) -> dict[str, int]:
    """The wanted ports, each replaced by a free one where something listens already.

    Raises:
        StartError: no two free ports next to each other were found.
    """
    chosen: dict[str, int] = {}
    with contextlib.ExitStack() as held:
        for use, port in wanted.items():
            chosen[use] = _hold_free(held, port, 2 if use in PAIRS else 1)
    return chosen


def _hold_free(held: contextlib.ExitStack, wanted: int, number: int) -> int:
    """The first of ``number`` free ports in a row, ``wanted`` if it can be. They are held for the caller."""
    for first in (wanted, *[0] * _TRIES_MAX):
        with contextlib.ExitStack() as mine:
            try:
                port = _hold(mine, first)
                for next_port in range(port + 1, port + number):
                    _hold(mine, next_port)
            except (OSError, OverflowError):
                continue
            held.push(mine.pop_all())
            return port
    raise StartError("no free ports were found", remedy="stop what holds ports of 127.0.0.1")


def _hold(mine: contextlib.ExitStack, port: int) -> int:
    probe = mine.enter_context(socket.socket())
    # An earlier run's closed connections do not count.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", port))
    return int(probe.getsockname()[1])


def write_spec(model: Path) -> tuple[Path, Compiled]:
    """Write the demo's spec into the state folder, load it back, and check it as ``antiphon config check`` does.

    Raises:
        SpecError: it cannot work on this machine; every problem is named.
    """
    path = Path(default_state_dir()).expanduser() / NAME / "antiphon.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    ports = free_ports(PORTS)
    text = SPEC.format(name=NAME, model=model, served_name=demo_model.SERVED_NAME, path=path, **ports)
    path.write_text(text)
    compiled = compile_all(load_spec(path))
    report = run_checks(compiled, gather_facts(compiled))
    if report.problems:
        raise SpecError(report.problems)
    return path, compiled


class Demo:
    """One run of the demo.

    Args:
        say: prints one line.
        stay: keep everything up after the questions, until Ctrl-C.
    """

    def __init__(self, say: Say, *, stay: bool) -> None:
        self._say = say
        self._stay = stay
        self._clock = Clock()
        self._first_answer_s: float | None = None

    async def run(self) -> int:
        """Run it; 0 if every check holds, 1 otherwise, 130 if it was interrupted.

        Raises:
            ConfigError, StartError: it could not be started; nothing is left running.
        """
        refuse_second(default_state_dir(), NAME)
        self._say(
            "Antiphon demo: prefill and decode on two vLLM engines, KV handed over by NIXL and kept for\n"
            "later requests by a cache server beside each engine, on this CPU.\n"
        )
        model = await asyncio.to_thread(
            demo_model.prepare, demo_model.cache_folder(), lambda text: self._progress("model", text)
        )
        path, compiled = write_spec(model)
        self._progress("spec", f"written to {path}")
        supervisor = Supervisor(compiled.plans, compiled.spec.supervisor, NAME, on_event=self._on_event)
        undo = supervisor.handle_signals()
        try:
            return await self._run(supervisor, compiled)
        except StartCancelled:
            return 130
        finally:
            undo()

    async def _run(self, supervisor: Supervisor, compiled: Compiled) -> int:
        async with supervisor:
            plans: dict[str, ProcessPlan] = {plan.name: plan for plan in compiled.plans}
            self._progress("ready", "two engines, a cache server for each, and the router")
            questions = asyncio.create_task(self._ask_and_check(plans))
            stopped = asyncio.create_task(supervisor.run_until_stopped())
            try:
                await asyncio.wait([questions, stopped], return_when=asyncio.FIRST_COMPLETED)
                if not questions.done():
                    await stopped  # raises where every process has failed
                    return 130
                code = questions.result()
                if self._stay and not stopped.done():
                    self._say_how_to_go_on(plans, supervisor)
                    await stopped
                return code
            finally:
                for task in (questions, stopped):
                    task.cancel()
                await asyncio.wait([questions, stopped])

    async def _ask_and_check(self, plans: dict[str, ProcessPlan]) -> int:
        router, prefill, decode = plans["router"], plans["prefill-0"], plans["decode-0"]
        before = await self._num_transfers(decode)
        reuse = Reuse(prefill, decode, plans["cache-prefill"])
        await reuse.begin()
        began = self._clock()
        async with Asker(router.base_url, decode.base_url, decode.model_name) as asker:
            await asker.warm()
            self._progress("hand-over", f"first one done in {self._clock() - began:.1f} s (the engines met)")
            answers = [await self._ask(asker, index) for index in range(len(QUESTIONS))]
            answers += await self._ask_twice(asker, reuse)
            checks = [_check_tags(answers)]
            num_handed_over = 1 + sum(answer.receipt["path"] == "pd" for answer in answers)
            checks.append(await self._check_transfers(decode, before, num_handed_over))
            checks += await reuse.checks()
            checks.append(await self._check_same_answers(asker, answers))
        self._say("\nChecks")
        for check in checks:
            self._say(f"  {'ok  ' if check.holds else 'FAIL'}  {check.name}: {check.seen}")
        assert self._first_answer_s is not None
        self._say(f"\nFirst answer {self._first_answer_s:.0f} s after the command began (install not counted).")
        return 0 if all(check.holds for check in checks) else 1

    async def _ask(self, asker: Asker, index: int) -> Answer:
        question = QUESTIONS[index]
        kind = f"{question.kind}{', streamed' if question.stream else ''}"
        self._say(f"\nQuestion {index + 1} ({kind}): {question.shown()}")
        answer = await asker.ask(question)
        if self._first_answer_s is None:
            self._first_answer_s = self._clock()
        self._say(f"  answer   {answer.shown()}")
        for line in answer.receipt_lines():
            self._say(line)
        return answer

    async def _ask_twice(self, asker: Asker, reuse: Reuse) -> list[Answer]:
        self._say(f"\nReuse: {LONG_QUESTION.shown()}")
        answers: list[Answer] = []
        for when in ("first", "again"):
            if answers:
                await reuse.forget()
                self._say("  both engines forget it: their own prefix caches are emptied")
            answer = await asker.ask(LONG_QUESTION)
            answers.append(answer)
            self._say(f"  {when}    {answer.first_token_ms:.0f} ms to the first token: {answer.shown()}")
            for line in answer.receipt_lines():
                self._say(line)
        return answers

    async def _check_transfers(self, decode: ProcessPlan, before: int, expected: int) -> Check:
        deadline = self._clock() + _COUNTER_DEADLINE_S
        counted = await self._num_transfers(decode) - before
        while counted < expected and self._clock() < deadline:
            await asyncio.sleep(0.2)  # the engine publishes its counters with a later step
            counted = await self._num_transfers(decode) - before
        return Check("NIXL", counted == expected, f"{counted} transfers on the decode engine for {expected} requests")

    async def _check_same_answers(self, asker: Asker, answers: list[Answer]) -> Check:
        alone = [await asker.ask_decode(answer) for answer in answers]
        num_equal = sum(text == answer.text for text, answer in zip(alone, answers, strict=True))
        seen = f"{num_equal} of {len(answers)} equal what the decode engine alone computes"
        return Check("same answers", num_equal == len(answers), seen)

    async def _num_transfers(self, decode: ProcessPlan) -> int:
        metrics = await scrape_metrics(decode.base_url, timeout_s=METRICS_TIMEOUT_S)
        return metrics.num_nixl_transfers or 0

    def _say_how_to_go_on(self, plans: dict[str, ProcessPlan], supervisor: Supervisor) -> None:
        self._say("\nIt stays up. Try it:\n")
        self._say(f"  {curl_line(plans['router'].base_url, plans['decode-0'].model_name)}\n")
        for record in supervisor.records():
            self._say(f"  log of {record.name}: {record.log_path}")
        self._say("\nantiphon status shows what runs. Ctrl-C stops everything.")

    def _on_event(self, event: SupervisorEvent) -> None:
        self._progress(event.process or "supervisor", event.text)

    def _progress(self, what: str, text: str) -> None:
        self._say(f"{self._clock():6.1f} s  {what:<10} {text}")


def _check_tags(answers: list[Answer]) -> Check:
    tagged = [answer for answer in answers if answer.is_tagged()]
    return Check("routing", len(tagged) == len(answers), f"{len(tagged)} of {len(answers)} ids name both engines")
