"""Slow simulation of a program's messages: an oracle for `pipefit.schema.program`.

It reads a program's text and shares no code with `pipefit`. A fixed point over all actions:

    a computation or a join is over     when all computations and joins before it on its device are, and, for
                                        a join, its start is complete
    a start may run                     when all computations and joins before it are over, and every earlier
                                        start of its line on its device (in a sum: of its stage) is complete
    a start is complete                 when it and its counterparts at the other ends of the line may run

NCCL's communicators determine the line of a start; under gloo every message is a separate line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

_WORD = re.compile(r"(\d+)(WAIT_)?([A-Z]+(?:_[FB])?)(\d*)(.*)")


@dataclass(frozen=True)
class Start:
    """A send, a receive or one rank's part in an all-reduce."""

    device: int
    stage: int
    word: str  # SEND_F, RECV_B, AGREE, ...
    microbatch: str
    subject: str

    @property
    def is_sum(self) -> bool:
        return "_" not in self.word

    @property
    def sends(self) -> bool:
        return self.word.startswith("SEND")

    @property
    def other(self) -> int:
        """Stage at the other end of a message."""
        return self.stage + (1 if self.word in {"SEND_F", "RECV_B"} else -1)

    @property
    def content(self) -> Hashable:
        """Identity of a message by content and stages, or of a sum."""
        if self.is_sum:
            return self.word, self.microbatch, self.subject
        ends = (self.stage, self.other) if self.sends else (self.other, self.stage)
        return self.word[-1], self.microbatch, ends


LineOf = Callable[[Start, tuple[int, ...]], Hashable]


def by_direction(start: Start, placement: tuple[int, ...]) -> Hashable:
    """Use a communicator for each direction of a boundary."""
    return start.word[-1], min(start.stage, start.other)


def by_pair(start: Start, placement: tuple[int, ...]) -> Hashable:
    """Use a communicator for each pair of devices."""
    return frozenset({placement[start.stage], placement[start.other]})


def by_tag(start: Start, placement: tuple[int, ...]) -> Hashable:
    """Use gloo's tags: every start meets the one of equal content."""
    return start.content


def outcome(devices: list[list[str]], placement: tuple[int, ...], line_of: LineOf) -> str:
    """Return whether a program "ends", "hangs", or delivers "other data"."""
    return _Oracle(devices, placement, line_of).outcome()


class _Oracle:
    def __init__(self, devices: list[list[str]], placement: tuple[int, ...], line_of: LineOf) -> None:
        self.devices, self.placement, self.line_of = devices, placement, line_of
        self.starts: dict[tuple[int, int], Start] = {}  # by device and position
        self.joined: dict[tuple[int, int], tuple[int, int]] = {}
        for device, words in enumerate(devices):
            self._read(device, words)
        self.done: set[tuple[int, int]] = set()

    def _read(self, device: int, words: list[str]) -> None:
        latest: dict[str, int] = {}
        for position, word in enumerate(words):
            found = _WORD.fullmatch(word)
            assert found is not None
            stage, wait, name, microbatch, subject = found.groups()
            if not re.match("SEND|RECV|REDUCE|AGREE", name):
                continue
            if wait:
                self.joined[device, position] = device, latest[word.replace("WAIT_", "")]
            else:
                latest[word] = position
                self.starts[device, position] = Start(device, int(stage), name, microbatch, subject)

    def outcome(self) -> str:
        before = -1
        while before < len(self.done):
            before = len(self.done)
            heads: dict[Hashable, dict[int, tuple[int, int]]] = {}
            for device in range(len(self.devices)):
                for line, end, item in self._heads(device):
                    heads.setdefault(line, {})[end] = item
            for met in heads.values():
                if not self._complete(met):
                    return "other data"
        return "ends" if len(self.done) == sum(map(len, self.devices)) else "hangs"

    def _heads(self, device: int) -> Iterator[tuple[Hashable, int, tuple[int, int]]]:
        """Return the starts of each device that may run, with their line and its end; finish computations on
        the way.
        """
        busy: set[tuple[Hashable, int]] = set()
        for position in range(len(self.devices[device])):
            item = device, position
            if item in self.starts:
                line, end = self._line(self.starts[item])
                if item not in self.done and (line, end) not in busy:
                    busy.add((line, end))
                    yield line, end, item
            elif item not in self.joined or self.joined[item] in self.done:
                self.done.add(item)
            else:
                return  # nothing after a join that is not over may run

    def _line(self, start: Start) -> tuple[Hashable, int]:
        if start.is_sum:
            return ("sum", self._members(start)), start.stage
        if self.placement[start.stage] == self.placement[start.other]:
            return start.content, start.stage
        return self.line_of(start, self.placement), start.device

    def _members(self, start: Start) -> frozenset[int]:
        if start.word == "AGREE":
            return frozenset(range(len(self.placement)))
        alike = (
            one for one in self.starts.values() if (one.word, one.subject) == (start.word, start.subject)
        )
        return frozenset(one.stage for one in alike)

    def _complete(self, met: dict[int, tuple[int, int]]) -> bool:
        """Complete the starts at the heads of one line, if all ends are there; False if their contents
        differ.
        """
        starts = [self.starts[item] for item in met.values()]
        first = starts[0]
        if len(starts) < (len(self._members(first)) if first.is_sum else 2):
            return True
        if not first.is_sum and starts[0].sends is starts[1].sends:
            return True  # two sends, or two receives, stay where they are
        if len({start.content for start in starts}) > 1:
            return False
        self.done.update(met.values())
        return True
