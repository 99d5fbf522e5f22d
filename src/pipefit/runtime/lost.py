"""What a failed transfer between workers means: another one is gone or slow, or this one has no memory left."""

from __future__ import annotations

from pipefit.errors import OutOfMemory, PeerLost, WorkerFailed, all_lines
from pipefit.limits import met
from pipefit.runtime.out_of_memory import ran_out


def lost(what: str, error: BaseException, device: int) -> WorkerFailed | OutOfMemory:
    """What to raise where `error` kept this process, which runs `device`, from what a sentence says: the loss of a
    peer, with what to do, or `OutOfMemory` or a limit of the system if that is what the error says.
    """
    said = all_lines(error)
    if ran_out(error):
        return OutOfMemory(
            f"device {device} has no memory left for messages between workers ({said}): plan with more --reserve"
        )
    if limit := met(error):
        return WorkerFailed(f"{what} ({said}); {limit}")
    late = "timed out" in said.lower() or "timeout" in said.lower()
    advice = "if it is only slow, raise timeout_seconds" if late else "the output of its own worker says why"
    return PeerLost(f"{what} ({said}); {advice}")
