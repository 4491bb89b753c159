"""Which test holds each row of the failure matrix in docs/routing.md, each failure that was provoked in another router
or reported by its users, and each of what is required of this one. Nothing is tested here but that the lists are whole
and that the tests exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "routing.md"

MATRIX = "router/test_failure_matrix.py"
RECOVERY = "router/test_failure_recovery.py"
KILL = "router/test_failure_kill.py"
REPORTED = "router/test_reported_failures.py"
FAILURES = "router/test_engine_failures.py"
HANDOVER = "router/test_handover.py"
LEAVES = "router/test_client_leaves.py"
LIMITS = "router/test_limits_and_end.py"
RELAY = "router/test_relay.py"
PASSTHROUGH = "router/test_passthrough.py"
OWN_ROUTES = "router/test_own_routes.py"
BYTES = "router/test_byte_fidelity.py"
TOOLS = "router/test_openai_tools.py"
ENDPOINTS = "router/test_endpoints.py"
METRICS = "router/test_metrics.py"
KEYS = "router/test_keys.py"
WARMING = "router/test_warming.py"
LARGE = "router/test_failure_large_body.py"
EDGE = "transport/test_http_limits.py"
POOL = "routing/test_pool.py"
PICKERS = "routing/test_pickers.py"
SIMULATION = "sim/test_routing_simulation.py"
STORM = "process/test_abort_storm.py"
LIFE = "process/test_router_life.py"

ROWS: dict[str, tuple[str, ...]] = {
    "prefill refuses the connection": (
        f"{MATRIX}::test_prefill_refuses_the_connection_and_another_answers_at_no_cost",
        f"{MATRIX}::test_every_prefill_refuses",
        f"{MATRIX}::test_decode_prefills_where_that_is_allowed",
    ),
    "prefill dies, resets, or is killed under load": (
        f"{MATRIX}::test_prefill_fails_once_and_another_answers_under_a_fresh_id",
        f"{MATRIX}::test_every_prefill_fails",
        f"{KILL}::test_one_of_two_prefill_engines_is_killed",
    ),
    "prefill hangs": (
        f"{MATRIX}::test_hanging_prefill_engine_holds_up_its_own_requests_only_and_is_left_alone",
        f"{MATRIX}::test_every_prefill_fails",
        f"{MATRIX}::test_prefill_falls_silent_in_the_middle_of_its_answer",
    ),
    "prefill answers 500": (
        f"{MATRIX}::test_prefill_fails_once_and_another_answers_under_a_fresh_id",
        f"{MATRIX}::test_every_prefill_fails",
    ),
    "prefill answers 429, 503": (
        f"{MATRIX}::test_prefill_fails_once_and_another_answers_under_a_fresh_id",
        f"{MATRIX}::test_every_prefill_fails",
        f"{MATRIX}::test_overload_without_a_time_to_come_again_gets_one",
        f"{REPORTED}::test_overload_of_the_prefill_pool_is_told_as_overload",
    ),
    "prefill answers something unusable": (
        f"{MATRIX}::test_prefill_fails_once_and_another_answers_under_a_fresh_id",
        f"{MATRIX}::test_every_prefill_fails",
    ),
    "prefill refuses the request (4xx)": (f"{MATRIX}::test_prefill_refuses_the_request",),
    "prefill returns no handle": (f"{MATRIX}::test_prefill_returns_no_handle",),
    "prefill restarts behind its address after it answered": (
        f"{MATRIX}::test_old_handles_of_a_restarted_prefill_engine_are_not_sent",
    ),
    "decode refuses the connection": (
        f"{MATRIX}::test_decode_refuses_the_connection_and_another_gets_the_same_handle",
        f"{MATRIX}::test_decode_that_takes_no_connection_is_passed_over_with_the_same_handle",
    ),
    "every decode engine refuses": (f"{MATRIX}::test_every_decode_engine_refuses",),
    "both pools refuse": (f"{MATRIX}::test_both_pools_refuse",),
    "decode is lost before a byte was written": (
        f"{MATRIX}::test_connection_that_was_closed_while_idle_is_no_failure",
    ),
    "decode is lost after that, before its first byte": (
        f"{MATRIX}::test_decode_fails_once_before_its_first_byte_and_a_fresh_prefill_serves",
        f"{MATRIX}::test_only_decode_engine_fails_once_and_gets_a_fresh_prefill",
        f"{MATRIX}::test_every_decode_engine_fails_before_its_first_byte",
    ),
    "decode answers 500, or fails the load because the prefill engine died": (
        f"{MATRIX}::test_decode_fails_once_before_its_first_byte_and_a_fresh_prefill_serves",
        f"{MATRIX}::test_only_decode_engine_fails_once_and_gets_a_fresh_prefill",
        f"{HANDOVER}::test_kv_that_cannot_be_loaded",
    ),
    "decode answers 429, 503": (
        f"{MATRIX}::test_decode_fails_once_before_its_first_byte_and_a_fresh_prefill_serves",
        f"{MATRIX}::test_every_decode_engine_fails_before_its_first_byte",
    ),
    "decode hangs before its first byte": (
        f"{MATRIX}::test_decode_hangs_before_its_first_byte_and_is_left_alone",
        f"{MATRIX}::test_head_of_a_stream_is_no_first_byte",
    ),
    "decode dies, or ends without `[DONE]`, mid-stream": (
        f"{MATRIX}::test_decode_fails_after_its_first_byte_and_nothing_is_tried_again",
        f"{KILL}::test_one_of_two_decode_engines_is_killed",
        f"{RELAY}::test_stream_that_ends_without_done_is_no_complete_answer",
    ),
    "decode falls silent mid-stream": (
        f"{MATRIX}::test_decode_fails_after_its_first_byte_and_nothing_is_tried_again",
        f"{FAILURES}::test_no_whole_event_that_the_engine_sent_in_time_is_lost",
    ),
    "decode refuses the request (4xx)": (
        f"{MATRIX}::test_refusal_by_a_decode_engine_keeps_its_status_and_words",
        f"{LIMITS}::test_a_refused_decode_request_lets_its_kv_be_pulled_all_the_same",
    ),
    "the lease runs out before decode connects": (f"{MATRIX}::test_lease_that_runs_out_costs_a_fresh_prefill",),
    "the router is out of connections": (
        f"{LIMITS}::test_a_limit_of_this_machine_takes_no_engine_down",
        f"{OWN_ROUTES}::test_models_while_no_further_connection_may_be_opened",
    ),
    "before the prefill's answer": (
        f"{LEAVES}::test_while_the_prefill_runs",
        f"{REPORTED}::test_client_that_leaves_is_followed_by_the_router",
    ),
    "while the prefill's answer arrives, or a decode engine connects": (
        f"{HANDOVER}::test_client_that_leaves_before_the_decode_request_still_has_its_kv_pulled",
        f"{HANDOVER}::test_answer_and_leaving_client_in_the_same_moment",
    ),
    "decode has the request, and has not answered": (
        f"{HANDOVER}::test_client_that_leaves_before_the_first_token_is_held_until_the_engine_has_answered",
        f"{HANDOVER}::test_grace_has_an_end",
        f"{LEAVES}::test_before_the_first_token",
    ),
    "in the stream": (
        f"{LEAVES}::test_in_the_middle_of_a_stream",
        f"{REPORTED}::test_client_that_leaves_is_followed_by_the_router",
    ),
}
"""By the first column of both tables."""

PROVOKED: dict[str, tuple[str, ...]] = {
    "a prefill engine is killed under load": (
        f"{KILL}::test_one_of_two_prefill_engines_is_killed",
        f"{SIMULATION}::test_a_killed_prefill_engine_costs_no_client_an_error",
    ),
    "the same, and health checks run often": (
        f"{MATRIX}::test_prefill_refuses_the_connection_and_another_answers_at_no_cost",  # without any check
        f"{RECOVERY}::test_engine_that_comes_and_goes_is_used_while_it_is_there",
    ),
    "a decode engine is killed under load": (
        f"{KILL}::test_one_of_two_decode_engines_is_killed",
        f"{MATRIX}::test_decode_refuses_the_connection_and_another_gets_the_same_handle",
        f"{SIMULATION}::test_a_killed_decode_engine_truncates_no_stream_in_silence",
    ),
    "every decode engine is gone": (
        f"{MATRIX}::test_every_decode_engine_refuses",
        f"{OWN_ROUTES}::test_pool_that_is_gone_is_said_before_any_work",
    ),
    "every prefill engine is gone": (
        f"{MATRIX}::test_every_prefill_refuses",
        f"{MATRIX}::test_decode_prefills_where_that_is_allowed",
    ),
    "an engine hangs": (
        f"{MATRIX}::test_every_prefill_fails",
        f"{MATRIX}::test_hanging_prefill_engine_holds_up_its_own_requests_only_and_is_left_alone",
        f"{MATRIX}::test_decode_hangs_before_its_first_byte_and_is_left_alone",
    ),
    "a decode engine hangs in a stream": (
        f"{MATRIX}::test_decode_fails_after_its_first_byte_and_nothing_is_tried_again",
        f"{FAILURES}::test_decode_engine_fails_in_the_middle_of_a_stream",
    ),
    "prefill answers 500 or resets": (
        f"{MATRIX}::test_prefill_fails_once_and_another_answers_under_a_fresh_id",
        f"{MATRIX}::test_every_prefill_fails",
    ),
    "prefill answers 503 or 429": (
        f"{MATRIX}::test_prefill_fails_once_and_another_answers_under_a_fresh_id",
        f"{REPORTED}::test_overload_of_the_prefill_pool_is_told_as_overload",
    ),
    "prefill answers 400 or 404": (f"{MATRIX}::test_prefill_refuses_the_request",),
    "prefill answers garbage": (
        f"{MATRIX}::test_prefill_fails_once_and_another_answers_under_a_fresh_id",
        f"{MATRIX}::test_every_prefill_fails",
    ),
    "prefill answers without a handle": (f"{MATRIX}::test_prefill_returns_no_handle",),
    "decode answers 500, 503 or 429": (
        f"{MATRIX}::test_decode_fails_once_before_its_first_byte_and_a_fresh_prefill_serves",
        f"{MATRIX}::test_every_decode_engine_fails_before_its_first_byte",
    ),
    "decode answers garbage": (
        f"{MATRIX}::test_whole_answer_of_a_decode_engine_that_is_no_json_is_passed_on_and_counted",
        f"{RELAY}::test_error_of_an_engine_that_is_no_json_becomes_json",
    ),
    "decode streams an error event": (f"{RELAY}::test_error_event_of_the_engine_is_passed_on_and_the_receipt_tells",),
    "decode resets before its head": (
        f"{MATRIX}::test_decode_fails_once_before_its_first_byte_and_a_fresh_prefill_serves",
    ),
    "the client leaves": (
        f"{REPORTED}::test_client_that_leaves_is_followed_by_the_router",
        f"{HANDOVER}::test_client_that_leaves_before_the_decode_request_still_has_its_kv_pulled",
        f"{STORM}::test_nothing_is_left_after_a_storm_of_aborts",
    ),
    "malformed bodies": (f"{FAILURES}::test_a_body_that_is_no_json_object_is_refused",),
    "a body of 64 MiB": (f"{LARGE}::test_large_body_costs_a_few_times_its_size",),
    "a body that is said to be too large": (
        f"{OWN_ROUTES}::test_body_that_is_too_large",
        f"{EDGE}::test_large_bodies_are_refused_with_413",
    ),
    "a header of 200 KB": (f"{EDGE}::test_large_headers_are_refused_with_431",),
    "half a body, then silence": (f"{EDGE}::test_requests_that_do_not_arrive_in_time_are_refused_with_408",),
    # The engine's verdict and not that of a list: adapters come and go at an engine that runs.
    "an unknown model": (f"{FAILURES}::test_unknown_model_is_the_prefill_engines_verdict",),
    "an engine is dead at the start": (
        f"{LIFE}::test_engine_that_is_down_at_the_start_and_comes_later",
        f"{LIMITS}::test_an_engine_that_has_never_answered_is_not_ready",
    ),
    "the router is told to stop": (
        f"{KILL}::test_router_that_is_told_to_stop_says_so_before_it_refuses_anybody",
        f"{LIFE}::test_signal_lets_live_streams_end",
        f"{OWN_ROUTES}::test_readiness_while_the_router_stops",
    ),
    "an engine flaps": (f"{RECOVERY}::test_flapping_engine_costs_no_client_anything_and_is_asked_less",),
    "an engine is taken out of service": (f"{RECOVERY}::test_engine_that_says_it_is_not_healthy_gets_nothing_new",),
}
"""What was done to another router, and to this one."""

LATER = "later: "
DOES_NOT_APPLY = "does not apply: "

REPORTS: dict[str, tuple[str, ...] | str] = {
    # By number; the comment names the project and its issue ("router" is vllm-project/router).
    # vllm 23981: a refusal by decode keeps its status.
    "T1": (f"{MATRIX}::test_refusal_by_a_decode_engine_keeps_its_status_and_words",),
    # vllm 50425: a client leaves between the prefill and the decode engine's admission.
    "T2": (
        f"{HANDOVER}::test_client_that_leaves_before_the_decode_request_still_has_its_kv_pulled",
        f"{LEAVES}::test_before_the_first_token",
        f"{STORM}::test_nothing_is_left_after_a_storm_of_aborts",
    ),
    # dynamo 13855
    "T3": (f"{HANDOVER}::test_client_that_leaves_before_the_decode_request_still_has_its_kv_pulled",),
    # vllm 41269: a refusal by decode strands no KV.
    "T4": (
        f"{LIMITS}::test_a_refused_decode_request_lets_its_kv_be_pulled_all_the_same",
        f"{FAILURES}::test_unknown_model_is_the_prefill_engines_verdict",
    ),
    # vllm 43509: n > 1.
    "T5": (f"{REPORTED}::test_several_sequences_hold_no_blocks_at_a_prefill_engine",),
    # vllm 49238: a prefill engine restarts.
    "T6": (
        f"{MATRIX}::test_old_handles_of_a_restarted_prefill_engine_are_not_sent",
        f"{WARMING}::test_engine_that_names_another_life_is_warmed_with_the_others",
    ),
    # router 177: stale loads.
    "T7": (f"{REPORTED}::test_new_requests_go_to_the_engine_that_has_less_to_do",),
    # router 215: counters that leak.
    "T8": (
        f"{REPORTED}::test_every_counter_is_given_back_exactly_once",
        f"{STORM}::test_nothing_is_left_after_a_storm_of_aborts",
    ),
    # router 197: health checks that reset counters.
    "T9": (f"{RECOVERY}::test_stream_in_progress_outlives_health_checks_and_is_counted_throughout",),
    # router 135: /v1/models while an engine is down.
    "T10": (f"{OWN_ROUTES}::test_models_while_one_engine_is_down",),
    # router 161: bodies are rewritten.
    "T11": (f"{BYTES}::test_two_hundred_bodies_reach_both_engines_byte_for_byte",),
    # router 159: credentials for engines.
    "T12": (
        f"{KEYS}::test_engines_are_shown_the_worker_key_health_checks_included",
        f"{KEYS}::test_without_keys_a_clients_authorization_goes_on_as_it_came",
    ),
    # router 193: cached_tokens is the whole prompt.
    "T13": (f"{REPORTED}::test_cached_tokens_are_what_the_prefill_engine_reused",),
    # router 224: [DONE], and the connection stays open.
    "T14": (f"{REPORTED}::test_stream_ends_at_done_though_the_engine_holds_its_connection",),
    # router 222
    "T15": f"{LATER}data-parallel ranks of an engine are not addressed; each rank is an engine with its own URL.",
    # router 148: refusals trip the breaker.
    "T16": (
        f"{MATRIX}::test_prefill_refuses_the_request",
        "routing/test_life.py::test_two_engines_that_fail_at_a_request_are_not_to_blame",
    ),
    # sglang 12355: every breaker is open.
    "T17": (
        f"{RECOVERY}::test_no_pool_is_ever_emptied_by_errors",
        f"{POOL}::test_where_all_are_down_each_is_tried_by_one_request_the_least_bad_first",
    ),
    # sglang 29482
    "T18": f"{DOES_NOT_APPLY}no prefill waits for a decode engine: it has ended when the decode engine is chosen.",
    # llm-d-router 1206: prefill errors become local prefills.
    "T19": (f"{MATRIX}::test_prefill_failures_never_turn_into_local_prefills",),
    # llm-d-router 1461: prefill and decode apart does not happen, and nobody sees it.
    "T20": (
        f"{MATRIX}::test_prefill_returns_no_handle",
        f"{PASSTHROUGH}::test_what_one_handle_cannot_serve_is_answered_by_a_decode_engine_alone",
        f"{PASSTHROUGH}::test_requests_with_a_handle_were_really_handed_over",
    ),
    # aibrix 2289: a prefill failure is swallowed.
    "T21": (f"{MATRIX}::test_every_prefill_fails",),
    # dynamo 10631: overload of prefill is 503.
    "T22": (f"{REPORTED}::test_overload_of_the_prefill_pool_is_told_as_overload",),
    # production-stack 634: cancellation is not passed on.
    "T23": (f"{REPORTED}::test_client_that_leaves_is_followed_by_the_router",),
    # production-stack 749: one engine hangs, and everything does.
    "T24": (
        f"{REPORTED}::test_engine_that_hangs_holds_up_nobody_else",
        f"{MATRIX}::test_hanging_prefill_engine_holds_up_its_own_requests_only_and_is_left_alone",
    ),
    # production-stack 1072: counters leak until the memory is gone.
    "T25": (f"{STORM}::test_nothing_is_left_after_a_storm_of_aborts",),
    # router 299: an engine that is discovered has no load. Here one is added by hand; it is counted as the others are.
    "T26": (f"{ENDPOINTS}::test_added_engine_gets_requests", f"{ENDPOINTS}::test_removing_waits_for_the_last_request"),
    # vllm-ascend 13165: a failure of decode is 200 with nothing in it.
    "T27": (
        f"{RELAY}::test_empty_stream_is_a_bad_gateway",
        f"{MATRIX}::test_every_decode_engine_fails_before_its_first_byte",
    ),
    # lmdeploy 4972: warm-ups without end.
    "T28": (f"{WARMING}::test_warm_ups_at_once_are_few",),
    # prime-rl 3255, Gym 3193: affinity pins an engine that has too much to do.
    "T29": (
        f"{REPORTED}::test_session_does_not_pin_an_engine_that_has_too_much_to_do",
        f"{PICKERS}::test_consistent_hash_never_exceeds_its_bound",
    ),
    # sglang 22853, vllm 25373
    "T30": f"{LATER}the first token comes from the decode engine; vLLM hands none over with the KV.",
    # dynamo 14661: pinning decode pins prefill.
    "T31": (f"{PASSTHROUGH}::test_pairs_mix", f"{POOL}::test_prefill_and_decode_turn_independently"),
    # router 46: a flag selects another mode.
    "T32": (
        f"{LIFE}::test_flags_that_cannot_work",
        f"{PASSTHROUGH}::test_completion_is_what_one_engine_alone_gives",
    ),
}


REQUIREMENTS: dict[str, tuple[str, ...] | str] = {
    # By number; the comment says what is required.
    # Bytes are spliced, never encoded again.
    "R1": (
        f"{BYTES}::test_two_hundred_bodies_reach_both_engines_byte_for_byte",
        f"{BYTES}::test_answer_bytes_reach_the_client_untouched",
    ),
    # Retries by stage, within the lease and a budget.
    "R2": (
        f"{MATRIX}::test_prefill_fails_once_and_another_answers_under_a_fresh_id",
        f"{MATRIX}::test_decode_refuses_the_connection_and_another_gets_the_same_handle",
        f"{MATRIX}::test_decode_fails_once_before_its_first_byte_and_a_fresh_prefill_serves",
        f"{MATRIX}::test_lease_that_runs_out_costs_a_fresh_prefill",
        f"{POOL}::test_retries_are_a_share_of_requests_and_a_floor",
    ),
    # Ejection at the first refused connection, a half-open breaker, never an empty pool, health checks beside it.
    "R3": (
        f"{MATRIX}::test_prefill_refuses_the_connection_and_another_answers_at_no_cost",
        f"{POOL}::test_the_trial_brings_it_back_or_doubles_the_wait",
        f"{RECOVERY}::test_no_pool_is_ever_emptied_by_errors",
        f"{RECOVERY}::test_engine_that_says_it_is_not_healthy_gets_nothing_new",
    ),
    # Decode is chosen late; pools count independently and exactly.
    "R4": (
        f"{MATRIX}::test_hanging_prefill_engine_holds_up_its_own_requests_only_and_is_left_alone",
        f"{POOL}::test_prefill_and_decode_turn_independently",
        f"{REPORTED}::test_new_requests_go_to_the_engine_that_has_less_to_do",
        f"{REPORTED}::test_every_counter_is_given_back_exactly_once",
    ),
    "R5": f"{LATER}whether a prompt is worth a hand-over needs its tokens, or those that a cache holds.",
    # Streams are passed as they are, and end truthfully.
    "R6": (
        f"{RELAY}::test_events_arrive_whole_however_they_were_cut",
        f"{MATRIX}::test_decode_fails_after_its_first_byte_and_nothing_is_tried_again",
        f"{RELAY}::test_silence_after_the_first_token_is_noticed_in_time_although_the_first_was_late",
    ),
    # A client that leaves leaves nothing behind.
    "R7": (
        f"{STORM}::test_nothing_is_left_after_a_storm_of_aborts",
        "real/test_client_api.py::test_nothing_is_left_of_a_hundred_clients_that_left",
    ),
    # Errors in the form of OpenAI's, with a truthful status, and no address.
    "R8": (
        f"{MATRIX}::test_every_prefill_fails",
        f"{MATRIX}::test_every_decode_engine_fails_before_its_first_byte",
        f"{PASSTHROUGH}::test_headers_and_receipt_agree",
        f"{PASSTHROUGH}::test_the_tag_can_be_switched_off",
    ),
    "R9": f"{LATER}a queue of the router's own, with priorities; connections and the engines' queues bound requests.",
    # Metrics, on the main port too.
    "R10": (
        f"{OWN_ROUTES}::test_metrics_reconcile_with_what_was_sent",
        f"{METRICS}::test_every_series_of_a_router_is_on_the_page",
        f"{METRICS}::test_time_between_tokens_is_the_mean_of_a_stream",
        f"{MATRIX}::test_prefill_returns_no_handle",
    ),
    # Keys of clients, of engines and of operators.
    "R11": (
        f"{KEYS}::test_a_client_without_a_key_is_refused",
        f"{KEYS}::test_engines_are_shown_the_worker_key_health_checks_included",
        f"{KEYS}::test_a_public_bind_without_keys_leaves_the_admin_routes_on_loopback",
        f"{OWN_ROUTES}::test_admin_key",
    ),
    # Engines come and go while the router runs.
    "R12": (
        f"{ENDPOINTS}::test_added_engine_gets_requests",
        f"{ENDPOINTS}::test_draining_lets_requests_end_and_takes_no_new_ones",
        f"{ENDPOINTS}::test_removing_waits_for_the_last_request",
        f"{WARMING}::test_added_engine_is_warmed_with_every_partner_before_it_takes_requests",
    ),
    # vllm-router's command line: every router process of these tests is started with it.
    "R13": (f"{PASSTHROUGH}::test_completion_is_what_one_engine_alone_gives", f"{LIFE}::test_flags_that_cannot_work"),
    # A prefill is one token, whole, of one sequence.
    "R14": (
        "protocol/test_handoff.py::test_prefill_asks_for_one_token_and_a_handle",
        "protocol/test_handoff.py::test_prefill_overrides_what_would_make_it_more_than_a_prefill",
        f"{REPORTED}::test_cached_tokens_are_what_the_prefill_engine_reused",
        f"{PASSTHROUGH}::test_what_one_handle_cannot_serve_is_answered_by_a_decode_engine_alone",
    ),
}


def rows_of_the_document() -> list[str]:
    """The first column of the tables under "Failure matrix"."""
    section = DOCUMENT.read_text().partition("## Failure matrix")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    return [row for row in rows if row not in ("fault", "when")]


@cache
def names_in(path: str) -> frozenset[str]:
    """The names of a file's tests."""
    nodes = ast.walk(ast.parse((TESTS / path).read_text()))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def missing(names: tuple[str, ...]) -> list[str]:
    """Those of the tests that do not exist."""
    parts = [name.split("::") for name in names]
    return [f"{path}::{name}" for path, name in parts if not (TESTS / path).is_file() or name not in names_in(path)]


def test_every_row_of_the_failure_matrix_is_listed() -> None:
    rows = rows_of_the_document()
    assert len(rows) > 20
    assert rows == list(ROWS)
    assert not ROWS.keys() & PROVOKED.keys()


@pytest.mark.parametrize("row", [*ROWS, *PROVOKED])
def test_tests_of_a_row_exist(row: str) -> None:
    names = (ROWS | PROVOKED)[row]
    assert names
    assert missing(names) == []


def test_every_report_and_every_requirement_is_listed() -> None:
    assert list(REPORTS) == [f"T{number}" for number in range(1, 33)]
    assert list(REQUIREMENTS) == [f"R{number}" for number in range(1, 15)]


@pytest.mark.parametrize("number", [*REPORTS, *REQUIREMENTS])
def test_tests_of_a_number_exist_or_it_says_why_there_are_none(number: str) -> None:
    entry = (REPORTS | REQUIREMENTS)[number]
    if isinstance(entry, str):
        assert entry.startswith((LATER, DOES_NOT_APPLY))
        assert len(entry.split()) > 6
    else:
        assert entry
        assert missing(entry) == []
