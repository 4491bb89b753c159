"""Where the tokens of a prompt came from, and which of its chunks have keys."""

from __future__ import annotations

import pytest

from antiphon.connector.requests import Sources, TrackedRequest
from antiphon.core.chunks import ChunkChain, chunk_keys
from tests.connector.blocks import CHUNK_SIZE
from tests.connector.engine import EngineRequest
from tests.connector.harness import identify, namespace_of


def counts(sources: Sources) -> tuple[int, int, int, int]:
    return sources.device, sources.l1, sources.remote_prefill, sources.computed


def test_a_chunked_prefill_is_computed_once() -> None:
    sources = Sources()
    for start in (0, 16, 32):
        sources.step(start, min(16, 40 - start), local_tokens=0, is_from_l1=False, prompt=40)
    sources.step(40, 1, local_tokens=0, is_from_l1=False, prompt=40)
    assert counts(sources) == (0, 0, 0, 40)


def test_a_full_hit_leaves_one_token_to_compute() -> None:
    sources = Sources()
    sources.step(31, 1, local_tokens=8, is_from_l1=True, prompt=32)
    assert counts(sources) == (8, 23, 0, 1)
    assert sources.total == 32


@pytest.mark.parametrize(("is_from_l1", "expected"), [(True, (4, 12, 0, 4)), (False, (4, 0, 12, 4))])
def test_what_was_loaded_has_the_source_that_loaded_it(is_from_l1: bool, expected: tuple[int, ...]) -> None:
    sources = Sources()
    sources.step(16, 4, local_tokens=4, is_from_l1=is_from_l1, prompt=20)
    assert counts(sources) == expected


def test_what_a_preempted_request_does_again_is_not_counted() -> None:
    sources = Sources()
    sources.step(0, 12, local_tokens=0, is_from_l1=False, prompt=40)
    sources.step(24, 8, local_tokens=16, is_from_l1=True, prompt=40)  # 12 to 16 are new from the engine's own cache
    assert counts(sources) == (4, 8, 0, 20)
    sources.step(0, 40, local_tokens=0, is_from_l1=False, prompt=40)
    assert counts(sources) == (4, 8, 0, 28)
    assert sources.total == 40


def test_output_tokens_have_no_source() -> None:
    sources = Sources()
    sources.step(0, 10, local_tokens=0, is_from_l1=False, prompt=10)
    sources.step(16, 4, local_tokens=16, is_from_l1=False, prompt=10)  # resumed, with output in the engine's cache
    assert counts(sources) == (0, 0, 0, 10)


def test_only_full_chunks_are_hashed_and_each_token_once() -> None:
    request = EngineRequest("one", list(range(20)), 8)
    identity = identify(request)
    assert not isinstance(identity, str)
    tracked = TrackedRequest(request, identity, ChunkChain(identity.namespace, CHUNK_SIZE))  # type: ignore[arg-type]
    assert tracked.extend_chain(15) == 1
    assert tracked.extend_chain(20) == 2
    assert tracked.extend_chain(7) == 0
    for token in range(4):
        request.append(token)
    assert tracked.extend_chain(24) == 3
    assert tracked.chain is not None
    assert tracked.chain.keys == chunk_keys(namespace_of(0), request.all_token_ids, CHUNK_SIZE)
    assert tracked.chain.num_tokens == 24
