"""A provider on this machine that answers as a function says; `seen` is what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.support.peer import Peer, Seen, answer_bytes, answering

# from a path, without its query, and how often it was asked for by now: status, headers, body
Answers = Callable[[str, int], tuple[int, Mapping[str, str], bytes]]


@dataclass
class Stub:
    """Its address, and the paths that were asked for, in order."""

    url: str = ""
    seen: list[str] = field(default_factory=list)


@contextmanager
def serving(answers: Answers) -> Iterator[Stub]:
    """A stub that answers so, until the block ends."""
    stub = Stub()

    def answer(seen: Seen) -> bytes:
        path = seen.target.partition("?")[0]
        stub.seen.append(path)
        status, headers, body = answers(path, stub.seen.count(path))
        return answer_bytes(body, f"{status} Said", **headers)

    with Peer(answering(answer)) as peer:
        stub.url = peer.url("")
        yield stub
