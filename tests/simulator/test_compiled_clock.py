"""The compiled clock against the one in Python, on random programs, to the last bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from pipefit.simulator import clock
from pipefit.simulator.clock import _LIBRARY, _compiled, _interpreted, _library
from pipefit.simulator.timed_program import (
    COMPUTE,
    COPY,
    JOIN,
    NOTHING,
    POST,
    RECEIVE,
    STREAMS,
    Part,
    TimedActions,
    TimedProgram,
)

pytestmark = pytest.mark.skipif(_LIBRARY is None, reason="the clock was not compiled")

SECONDS = 0.0, 0.1, 0.1, 0.3, 1.0, 1 / 3  # many events are simultaneous
RATES = 1.0, 0.7, 0.5


def program_of(devices: list[TimedActions], opposite: list[int]) -> TimedProgram:
    """Return a program without transfers."""
    result = TimedProgram.__new__(TimedProgram)
    result.devices, result.opposite = devices, opposite
    result.parts, result.streams, result.ends = [], [], []
    return result


class Drawn:
    """A random program whose devices never wait for each other for ever.

    Actions are drawn in one order for all devices, and wait only for transfers that have started before.
    """

    def __init__(self, rng: Random) -> None:
        self.rng, self.devices = rng, [TimedActions([], [], []) for _ in range(rng.randint(1, 5))]
        self.wires, self.is_slowed = 2 * rng.randint(1, 4), rng.random() < 0.5  # two wires are a link
        opposite = [wire ^ 1 if self.is_slowed else -1 for wire in range(self.wires)]
        self.program = program_of(self.devices, opposite)
        self.known: list[list[int]] = [[] for _ in self.devices]  # transfers that each may wait for
        for _ in range(rng.randint(1, 60)):
            self.draw(rng.randrange(len(self.devices)))

    def draw(self, device: int) -> None:
        """Draw an action of a device, or the start of a transfer."""
        match self.rng.randrange(10):
            case 0 | 1 if self.known[device]:
                self.act(device, JOIN, self.rng.choice(self.known[device]))
            case 2 | 3:
                stream = STREAMS * device + self.rng.randrange(STREAMS)
                self.start(self.parts(0, 2), stream, [device], (COPY,))
            case 4:  # a message to itself
                self.start((), -1, [device, device], (POST, RECEIVE))
            case 5 | 6:
                every = range(len(self.devices))
                self.start(self.parts(1, 4), -1, self.rng.sample(every, len(every)), (POST, RECEIVE))
            case _:
                self.act(device, self.rng.choice((NOTHING, COMPUTE)))

    def act(self, device: int, code: int, transfer: int = -1) -> None:
        """Add an action."""
        for of, value in zip(self.devices[device], (code, self.rng.choice(SECONDS), transfer), strict=True):
            of.append(value)

    def start(
        self, parts: tuple[Part, ...], stream: int, starters: list[int], codes: tuple[int, ...]
    ) -> None:
        """Add a transfer, and the actions that start it."""
        number = len(self.program.parts)
        for one in starters:
            self.act(one, self.rng.choice(codes), number)
        for one in dict.fromkeys(starters):
            self.known[one].append(number)
        self.program.parts.append(parts)
        self.program.streams.append(stream)
        self.program.ends.append(len(starters))

    def parts(self, least: int, most: int) -> tuple[Part, ...]:
        """Draw parts of a transfer, each over one to three wires."""
        result = list[Part]()
        for _ in range(self.rng.randint(least, most)):
            own = tuple(self.rng.sample(range(self.wires), self.rng.randint(1, min(3, self.wires))))
            rates = tuple(self.rng.choice(RATES) if self.is_slowed else 1.0 for _ in own)
            result.append((self.rng.choice(SECONDS), own, rates))
        return tuple(result)


@pytest.mark.parametrize("seed", range(40))
def test_the_compiled_clock_tells_the_same_times(seed: int) -> None:
    """All times of one step and of several are equal, whatever devices, streams and wires wait for."""
    assert _LIBRARY is not None
    rng = Random(f"clock {seed}")
    for _ in range(25):
        program, steps = Drawn(rng).program, rng.choice((1, 2, 5))
        assert _compiled(_LIBRARY, program, steps) == _interpreted(program, steps)


def test_devices_that_wait_for_ever_are_noticed() -> None:
    """Both clocks refuse a program whose device waits for a transfer that no device starts."""
    assert _LIBRARY is not None
    program = program_of([TimedActions([JOIN], [0.0], [0])], [-1])
    program.parts, program.streams, program.ends = [((1.0, (0,), (1.0,)),)], [-1], [1]
    with pytest.raises(AssertionError, match="would hang"):
        _compiled(_LIBRARY, program, 1)
    with pytest.raises(AssertionError, match="would hang"):
        _interpreted(program, 1)


def test_a_library_of_another_source_is_not_used(tmp_path: Path) -> None:
    """A library that was compiled before its source changed is left, and so is one of an older version."""
    folder = Path(clock.__file__).parent
    assert _library(tmp_path) is None
    for name in ("clock.c", "_clock.so"):
        shutil.copy(folder / name, tmp_path)
    assert _library(tmp_path) is not None
    source = tmp_path / "clock.c"
    source.write_text(source.read_text() + "\n")
    assert _library(tmp_path) is None
