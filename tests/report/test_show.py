"""Programs as text."""

from __future__ import annotations

from pipefit.report.show import describe
from pipefit.schema.program import parse_program

TEXT = """device 0: 0OFFLOAD0#0@host 0WAIT_OFFLOAD0#0@host 0SEND_F0 0RECV_B-1 0WAIT_RECV_B-1
device 1:
device 2: 1RECV_F0 1WAIT_RECV_F0 1SEND_B0 1WAIT_SEND_B-1
bundle 0: 0.0 1.2
carried in 0:
carried in 1:
carried in 2: 1SEND_B-1
carried out 0: 0SEND_F0
carried out 1:
carried out 2: 1SEND_B0"""


def test_a_program_is_shown_with_all_that_its_actions_name() -> None:
    """Bundles and transfers joined by other bodies are shown next to the actions; devices without actions are
    left out.
    """
    head, *lines = describe(parse_program(TEXT, placement=((0,), (2,)), microbatches=1))
    assert head == "program of 2 stages and 1 microbatch"
    assert lines == [line for line in TEXT.splitlines() if not line.endswith(":")]
