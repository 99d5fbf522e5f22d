"""The fake profiler: costs of every layer from fake tensors, without hardware, data or memory.

Each kind of layer is built and run under a meter once, however often the model repeats it. For the target
`cpu`, each operation that has not been measured on this machine yet runs once with real tensors, for the
workspace of its kernel. Bytes are exact for the target's kernels; seconds come from `pipefit.timing` or from
the measured profiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pipefit.capture import Chain, Task, check_samples
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.fake_cuda.chain import Chains, layers_again
from pipefit.fake_cuda.fingerprint import Fingerprinted, fingerprint, precision_of, with_loss
from pipefit.fake_cuda.target import FakeTarget
from pipefit.measure import Kernels, this_machine
from pipefit.profiler.survey import Progress, of_rank, sharded_chains, survey
from pipefit.runtime import check_elementwise
from pipefit.schema.layer_costs import KernelMemory
from pipefit.schema.profile import Assumptions, Measurement, ModelProfile, Target, differences
from pipefit.tensor_parallel import Alone
from pipefit.texts import counted

__all__ = ["Progress", "profile_fake", "profile_sizes"]


def profile_sizes(
    task: Task,
    sizes: Sequence[int],
    *,
    target: Target,
    threads: int,
    tensor: Sequence[int] = (),
    sequences: bool = False,
    progress: Progress | None = None,
    chains: Chains | None = None,
) -> ModelProfile:
    """Return the profile of `task` at each of these numbers of samples; see `profile_fake` for a single one.

    `chains` supplies the chains; by default each is traced.

    Raises:
        UsageError: the model has other layers at one size than at another, as if a trace takes other
            branches.
    """
    chains = chains or Chains(task)
    first, *others = (
        profile_fake(
            chains,
            microbatch_size=size,
            target=target,
            threads=threads,
            tensor=tensor,
            sequences=sequences,
            progress=progress,
        )
        for size in sizes
    )
    for other in others:
        result = differences(first.fingerprint, other.fingerprint, first.layers)
        if result:
            size = other.measurements[0].microbatch_size
            raise UsageError(
                f"{task.name} differs between {counted(size, 'sample')} and {sizes[0]} "
                f"({'; '.join(result)}), so no plan could use both sizes: profile it at one size, or make "
                "its operations independent of the number of samples"
            )
    every = (first, *others)
    kernels = tuple(dict.fromkeys(kernel for result in every for kernel in result.kernels.kernels))
    measurements = tuple(measurement for result in every for measurement in result.measurements)
    return replace(first, measurements=measurements, kernels=KernelMemory(kernels=kernels))


def profile_fake(
    chains: Chains,
    *,
    microbatch_size: int,
    target: Target,
    threads: int,
    tensor: Sequence[int] = (),
    sequences: bool = False,
    progress: Progress | None = None,
) -> ModelProfile:
    """Return the profile of a task at one microbatch size, for `target`'s kernels on `threads` CPU threads.

    Layers are measured whole, and divided between each number of ranks in `tensor`; with `sequences` also
    along positions.

    Raises:
        UsageError: a number of ranks divides nothing of the model, a layer cannot be traced, or the optimizer
            needs whole parameters.
    """
    task = chains.task
    like = sample(task, microbatch_size)
    check_samples(like, microbatch_size, task.name)
    kernels = Kernels(threads) if target == "cpu" else None
    with FakeTarget(target) as fake:
        divides = any(degree > 1 for degree in tensor)  # runs layers, to trace them
        chain = (chains.of if divides else chains.unrun)(microbatch_size, fake, like)
        made = fingerprint(task, chain)
        values = tuple(map(fake.fake, chain.flatten(like[0])))
        targets = tuple(map(fake.fake, chain.flatten_targets(like[1])))
        divided = sharded_chains(chain, tensor, values, targets, sequences=sequences)  # before any layer runs
        whole = survey(
            task, kernels, chain, values, targets, progress, lambda layer: layers_again((layer,), fake)[0]
        )
        measurements = [whole]
        for sharded in divided:
            rank = sharded.rank(Alone(rank=0, size=sharded.ranks))
            check_elementwise(task, rank.layers, sharded.shards(0), torch.device("cpu"))
            result = survey(task, kernels, rank, values, targets, progress, lambda layer: layer)
            measurements.append(of_rank(result, whole, sharded))
    made = with_loss(made, chain, whole)
    profile = _profile(task, chain, made, measurements, target=target, threads=threads)
    profile = profile if kernels is None else _with_kernels(profile, kernels)
    return replace(profile, kernels=KernelMemory(kernels=(*fake.unknown.kernels, *profile.kernels.kernels)))


def _with_kernels(profile: ModelProfile, kernels: Kernels) -> ModelProfile:
    """Return the profile with the workspaces of CPU kernels, and the processor on which they were
    measured.
    """
    kernels.keep()
    machine = this_machine(kernels.threads)
    assumptions = replace(
        profile.assumptions, cpu=machine.cpu, capability=machine.capability, processor=machine.details
    )
    return replace(profile, assumptions=assumptions, kernels=kernels.memory)


def _profile(
    task: Task,
    chain: Chain,
    made: Fingerprinted,
    measurements: Sequence[Measurement],
    *,
    target: Target,
    threads: int,
) -> ModelProfile:
    """Return the profile of the measurements, with names, fingerprint and assumptions."""
    return ModelProfile(
        model=chain.name,
        fingerprint=made.fingerprint,
        layers=tuple(layer.name for layer in chain.layers),
        blocks=chain.blocks,
        measurements=tuple(replace(measurement, sizes=made.sizes) for measurement in measurements),
        assumptions=Assumptions(
            target=target,
            device="fake",
            precision=precision_of(task, chain),
            optimizer=made.fingerprint.optimizer,
            torch=torch.__version__,
            threads=threads,
        ),
    )
