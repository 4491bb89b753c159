"""What may answer a call, and what gives back what an unwanted answer granted. Pure functions."""

from __future__ import annotations

from typing import Final

from antiphon.core.errors import ProtocolError
from antiphon.protocol import cache as protocol
from antiphon.protocol.cache import KEY_BYTES, Abort, Answered, Body, Failure, Found, Lookup, Release, Reserve, Reserved

ANSWER_OF: Final[dict[type[Body], type[Answered]]] = {
    protocol.Hello: protocol.Welcome,
    protocol.Attach: protocol.Attached,
    protocol.Lookup: protocol.Found,
    protocol.Release: protocol.LeaseNoted,
    protocol.CopyBegan: protocol.LeaseNoted,
    protocol.CopyEnded: protocol.LeaseNoted,
    protocol.Reserve: protocol.Reserved,
    protocol.Commit: protocol.Committed,
    protocol.Abort: protocol.Aborted,
    protocol.Clear: protocol.Cleared,
    protocol.Report: protocol.Noted,
    protocol.EngineNote: protocol.Noted,
    protocol.AskProcesses: protocol.Processes,
    protocol.Ping: protocol.Noted,
}
"""The answer to each call, beside ``Failure``."""


def check_answer(call: Body, answer: Answered) -> None:
    """``answer`` fits ``call``, so that a caller may index one by the other.

    Raises:
        ProtocolError: it does not; nothing that this server says can be relied on then.
    """
    if isinstance(answer, Failure):
        return
    if not isinstance(answer, ANSWER_OF[type(call)]):
        raise ProtocolError(f"{type(call).__name__} was answered with {type(answer).__name__}")
    if isinstance(answer, Found):
        assert isinstance(call, Lookup)
        places = [place for _, its_places in answer.fetched for place in its_places]
        if not all(0 <= place < len(answer.regions) for place in places):
            raise ProtocolError("a lookup tells the source of chunks that it has not found")
        if len(answer.regions) > len(call.keys) // KEY_BYTES or (answer.lease is None) != (not answer.regions):
            raise ProtocolError(f"a lookup found {len(answer.regions)} chunks under lease {answer.lease}")
    elif isinstance(answer, Reserved):
        assert isinstance(call, Reserve)
        granted = [index for index, verdict in enumerate(answer.verdicts) if verdict == "write"]
        if len(answer.verdicts) != len(call.keys) // KEY_BYTES or granted != [grant.index for grant in answer.grants]:
            raise ProtocolError("the verdicts and grants of a reservation do not belong to its keys")
    elif isinstance(answer, protocol.Committed):
        assert isinstance(call, protocol.Commit)
        if len(answer.outcomes) != len(call.regions):
            raise ProtocolError("a commit was answered for another number of regions")


def undo_of(call: Body, answer: Answered) -> Release | Abort | None:
    """The call that gives back what ``answer`` granted to a caller that is gone; None where it granted nothing."""
    if isinstance(answer, Found) and isinstance(call, Lookup) and answer.lease is not None:
        return Release(request=call.request, lease=answer.lease)
    if isinstance(answer, Reserved) and answer.grants:
        return Abort(regions=tuple(grant.region for grant in answer.grants))
    return None
