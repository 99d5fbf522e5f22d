"""Fingerprints: equal for one task on any machine, different for every change of a cost, and described in
words.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gallery
from pipefit.capture import Chain, Task, capture
from pipefit.capture.sample import in_mode, sample
from pipefit.errors import FileError, UsageError
from pipefit.fake_cuda.chain import fake_chain
from pipefit.fake_cuda.fingerprint import Fingerprinted, fingerprint, with_loss
from pipefit.fake_cuda.target import FakeTarget
from pipefit.models.hugging_face import hf
from pipefit.profiler import profile
from pipefit.profiler.training_runs.profilers import profile_trimmed
from pipefit.report.show import text
from pipefit.runtime import Trainer, certify
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Fingerprint, ModelProfile, differences
from pipefit.schema.training import Training
from support.gallery_samples import sampled
from support.huggingface_models import TINY
from support.small_tasks import plan_of, profile_of


class Color(Enum):
    RED = 1


class Heads(nn.Module):
    """Attention with a number of heads that is not in any parameter; traced, because it is not an
    `nn.Sequential`.
    """

    def __init__(self, heads: int = 2, rate: float = 0.1) -> None:
        super().__init__()
        self.heads, self.rate = heads, rate
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        split = self.project(x).view(x.shape[0], -1, 3, self.heads, 8 // self.heads).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(split[0] @ split[1].transpose(-1, -2), -1) @ split[2]
        return F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.rate)


class Own(nn.Module):
    """A layer with settings of all sorts."""

    def __init__(self, setting: object = None) -> None:
        super().__init__()
        self.setting = setting

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Unpacked(nn.Module):
    """A layer that takes a tensor, or a tuple of one."""

    def forward(self, x: Tensor | tuple[Tensor]) -> Tensor:
        return x if isinstance(x, Tensor) else x[0]


class Plain:
    """An object among a layer's settings."""

    def __init__(self, number: int) -> None:
        self.number = number


def layers(*, width: int = 16, rate: float = 0.1, inplace: bool = False, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, width),
        nn.Dropout(rate),
        nn.BatchNorm1d(width),
        nn.ReLU(inplace),
        nn.Linear(width, 4, bias=bias),
    )


def batch(
    size: int, inputs: tuple[int, ...] = (8,), outputs: tuple[int, ...] = (4,)
) -> tuple[Tensor, Tensor]:
    return torch.randn(size, *inputs), torch.randn(size, *outputs)


BASE = Task(
    layers,
    batch=batch,
    loss=F.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    name="base",
)
TRACED = replace(BASE, module=Heads, batch=partial(batch, inputs=(6, 8), outputs=(6, 4)))
SMALL = ("unet", "tied", "frozen", "two losses", "repeated", "quantised", "centring")
SETTINGS = (
    {"b": 1, "a": {"x"}}, {"x", "y", "z"}, Color.RED, torch.relu, partial(F.gelu, approximate="tanh"), lambda x: x,
    Plain(3), torch.device("cpu"), [torch.float16, (1, None)],
)  # fmt: skip
HAND_WRITTEN = {
    "base": BASE,
    "settings": replace(BASE, module=lambda: nn.Sequential(*map(Own, SETTINGS), nn.Linear(8, 4))),
    "encoder": replace(
        BASE, module=lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 4)),
        batch=partial(batch, inputs=(6, 8), outputs=(6, 4)),
    ),
}  # fmt: skip


def of(task: Task, size: int = 2, device: str = "") -> Fingerprint:
    """Return the fingerprint as in a profile, or of the chain on a real device, as in a trainer."""
    made = profile_of(task, size)
    if not device:
        return made.fingerprint
    like = sample(task, size)
    with torch.device(device):
        module = in_mode(task.build(), True)
    return whole(task, capture(replace(task, module=module), *like), made).fingerprint


def in_one_stage(task: Task) -> Plan:
    """Return a plan of all layers on one device."""
    return plan_of(task, [len(profile_of(task, 2).layers)])


def whole(task: Task, chain: Chain, made: ModelProfile) -> Fingerprinted:
    """Return the chain with the loss, as a trainer builds it."""
    return with_loss(fingerprint(task, chain), chain, made.measurements[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sampled([*SMALL, *HAND_WRITTEN], often=["tied", "quantised", *HAND_WRITTEN]))
def test_it_is_the_same_for_every_size_and_device(name: str) -> None:
    """Profiles for two samples or four, for CPU or CUDA, and of real tensors have one fingerprint; sizes
    agree if the microbatch size does.
    """
    task = HAND_WRITTEN.get(name) or gallery.task(name)
    made = profile_of(task, 2)
    assert profile(task, microbatch_size=4).fingerprint == made.fingerprint
    like = sample(task, 2)
    real = whole(task, capture(replace(task, module=in_mode(task.build(), True)), *like), made)
    with FakeTarget("cuda") as fake:
        faked = whole(task, fake_chain(task, fake, like), made)
    assert real == faked == (made.fingerprint, made.measurements[0].sizes)


class Sized(nn.Module):
    """Two layers with an operation between them and after them."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operation = operation
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self.last(self.operation(self.first(x))))


def filled(x: Tensor) -> Tensor:
    """Shift to the right, like the inputs of a decoder."""
    shifted = x.new_zeros(x.shape)
    shifted[:, 1:] = x[:, :-1].clone()
    shifted[:, 0] = 1.0
    return shifted


def among_all(x: Tensor) -> Tensor:
    """Select tokens by number from all samples in one row."""
    rows = x.reshape(len(x) * 6, 8)
    return torch.zeros_like(rows).index_add(0, torch.arange(6 * len(x)), rows).view(-1, 6, 8)


SIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous part": lambda x: x[:, 1:].contiguous().view(len(x), -1, 8),
    "part by reshape": lambda x: x[:, 1:].reshape(-1).view(len(x), -1, 8),
    "filled": filled,
    "first of each": lambda x: x + x[:, 0].unsqueeze(1),
    "among all": among_all,
    "expanded": lambda x: x.mean(0, keepdim=True).expand(len(x), -1, -1),
    "sizes in a list": lambda x: x + torch.full([len(x), 6, 8], 3.0),
    "sizes as keywords": lambda x: x + torch.ones(size=(len(x), 1, 8)).repeat(1, x.shape[1], 1),
    "a mean of its own": lambda x: x * (1 / len(x)) + x.sum(0, keepdim=True) / len(x),
    "numbers of samples": lambda x: x[torch.arange(len(x)).flip(0)],
    "rolled": lambda x: torch.roll(x, (len(x) + 1) // 2, 0),
    "split": lambda x: torch.cat(x.split((2, 4), 1)[::-1], 1),
    "time first": lambda x: x.transpose(0, 1).contiguous().tanh().transpose(0, 1),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("operation", SIZED.values(), ids=SIZED)
def test_no_operation_depends_on_how_many_samples_there_are(operation: Callable[[Tensor], Tensor]) -> None:
    """A profile may hold all sizes, with the same layers: one sample, with contiguous parts, or three."""
    made = profile(sized(partial(Sized, operation)), microbatch_size=[1, 3])
    assert [found.microbatch_size for found in made.measurements] == [1, 3]


def sized(module: Callable[[], nn.Module]) -> Task:
    """Return the fingerprint of a module on six vectors for each sample, without a target."""
    return replace(
        BASE, module=module, batch=partial(batch, inputs=(6, 8)), loss=lambda y, _: y.pow(2).mean()
    )


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "contiguous": lambda y, _: y[:, 1:].contiguous().view(-1).pow(2).mean(),
    "reshape": lambda y, _: y[:, 1:].reshape(-1).pow(2).mean(),
    "a mean of its own": lambda y, _: y.pow(2).sum() * (1 / len(y)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_no_loss_depends_on_how_many_samples_there_are(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Functions of torch that the loss calls are equal for every size, whichever kernels they run."""
    task = replace(sized(partial(Sized, torch.relu)), loss=loss)
    assert len(profile(task, microbatch_size=[1, 3]).measurements) == 2


HF = {
    "gpt2": {**TINY["gpt2"], "n_layer": 1, "sequence": 8},
    "t5": {**TINY["t5"], "num_layers": 1, "num_decoder_layers": 1},
    "mixtral": {**TINY["llama"], "num_hidden_layers": 1, "num_local_experts": 4, "sequence": 8},
}


@pytest.mark.gallery
@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.gallery) for name in ("t5", "mixtral"))]
)
def test_models_of_transformers_are_the_same_for_one_sample_and_two(name: str) -> None:
    """The models shift tokens within each sample, make parts contiguous and view them in other shapes."""
    assert len(profile(hf(name, **HF[name]), microbatch_size=[1, 2]).measurements) == 2


BY_SIZE: dict[str, Callable[[Tensor], Tensor]] = {
    "another function": lambda x: torch.tanh(x) if len(x) == 1 else torch.relu(x),
    "no dropout": lambda x: F.dropout(x, 0.0 if len(x) == 1 else 0.5),
    "a copy": lambda x: x.clone() * 2.0 if len(x) == 1 else x * 2.0,
}


@pytest.mark.parametrize("operation", BY_SIZE.values(), ids=BY_SIZE)
def test_another_model_at_another_size_is_refused(operation: Callable[[Tensor], Tensor]) -> None:
    """A model that branches on the number of samples, in its layers or in its loss, is refused."""
    tasks = (
        sized(partial(Sized, operation)),
        replace(sized(partial(Sized, torch.relu)), loss=lambda y, _: operation(y).pow(2).mean()),
    )
    for task, says in zip(
        tasks, ("(other operations in layer|2 layers, not 4)", "another loss"), strict=True
    ):
        with pytest.raises(UsageError, match=rf"base differs between 2 samples and 1 \(.*{says}"):
            profile(task, microbatch_size=[1, 2])


@pytest.mark.sample(1)
@pytest.mark.parametrize("task", HAND_WRITTEN.values(), ids=HAND_WRITTEN)
def test_modules_on_the_meta_device_have_that_of_real_ones(task: Task) -> None:
    """Tensors without bytes do not change the fingerprint."""
    assert of(task, device="meta") == of(task, device="cpu") == of(task)


@pytest.mark.gallery
def test_it_is_the_same_in_every_process() -> None:
    """Another process, with other hash randomisation, prints the same fingerprint."""
    program = (
        "import test_fingerprint as t; print([t.of(task).digest for task in (*t.HAND_WRITTEN.values(), "
        "t.TRACED)])"
    )
    here = [of(task).digest for task in (*HAND_WRITTEN.values(), TRACED)]
    seed = next(seed for seed in ("1", "2") if seed != os.environ.get("PYTHONHASHSEED"))
    paths = os.pathsep.join(["tests", "tests/fake", "src"])
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert ran.stdout.strip() == str(here)


@pytest.mark.parametrize("watch", [sys.setprofile, sys.settrace])
def test_it_is_the_same_under_a_profiler_and_a_debugger(watch: Callable[[object], None]) -> None:
    """Python calls methods differently then, and torch passes an empty mapping instead of None."""
    task = replace(TRACED, loss=lambda y, t: F.mse_loss(y.float().flatten(), t.flatten()))
    made = profile(task, microbatch_size=2)
    before = sys.getprofile(), sys.gettrace()
    watch(lambda *_: None)
    try:
        seen = profile(task, microbatch_size=2)
    finally:
        sys.setprofile(before[0])
        sys.settrace(before[1])
    assert seen == made


def test_a_loss_that_fails_is_no_loss_of_another_plan() -> None:
    """The message quotes the loss's own error, instead of guessing that a plan was made for another loss."""

    def fails(y: Tensor, t: Tensor) -> Tensor:
        raise ZeroDivisionError("nothing to divide by")

    plan = in_one_stage(BASE)
    for run in (certify, Trainer):
        with pytest.raises(
            UsageError, match=r"the loss of base fails .* \(ZeroDivisionError: nothing to divide by\)"
        ):
            run(replace(BASE, loss=fails), plan)


def frozen() -> nn.Module:
    made = layers()
    made[0].weight.requires_grad_(False)
    return made


def tied() -> nn.Module:
    made = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4))
    made[2].weight = made[0].weight
    return made


def untied() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4))


def paired(*, shares: bool) -> nn.Module:
    """Return a layer with two parts that may share a weight."""
    made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    made[1].weight = made[0].weight if shares else made[1].weight
    return nn.Sequential(made)


def no_decay(name: str, parameter: nn.Parameter) -> dict[str, float]:
    return {"weight_decay": 0.0} if name.endswith("bias") else {}


SGD, ADAM = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.AdamW, lr=0.1)
OTHERS: list[tuple[Task, Task, str]] = [
    (BASE, replace(BASE, module=partial(layers, width=32)), "other parameters or buffers in layers 0, 2, 4"),
    (BASE, replace(BASE, module=frozen), "other parameters or buffers in layer 0"),
    (BASE, replace(BASE, module=partial(layers, bias=False)), "other parameters or buffers in layer 4"),
    (BASE, replace(BASE, module=partial(layers, rate=0.0)), "other settings or other operations in layer 1"),
    (BASE, replace(BASE, module=partial(layers, inplace=True)), "other settings or other operations in layer 3"),
    (BASE, replace(BASE, module=lambda: layers()[:4], batch=partial(batch, outputs=(16,))), "5 layers, not 4"),
    (replace(BASE, module=tied), replace(BASE, module=untied), r"shared parameters 0\.weight = 2\.weight, not none"),
    (replace(BASE, module=partial(paired, shares=True)), replace(BASE, module=partial(paired, shares=False)),
     "other parameters or buffers in layer 0"),
    (TRACED, replace(TRACED, module=partial(Heads, rate=0.0)), "(other operations in layer|4 layers, not 3)"),
    (TRACED, replace(TRACED, batch=partial(batch, inputs=(5, 8), outputs=(5, 4))),
     r"inputs of float32 \(n, 6, 8\), not float32 \(n, 5, 8\); targets of float32 \(n, 6, 4\), not float32 \(n, 5"),
    (TRACED, replace(TRACED, module=partial(Heads, heads=4)), "operations of other sizes, such as another number of"),
    (BASE, replace(BASE, batch=lambda n: (batch(n)[0].double(), batch(n)[1]), module=lambda: layers().double()),
     r"float32 \(n, 8\), not float64 \(n, 8\)"),
    (replace(BASE, module=lambda: nn.Sequential(Unpacked(), *layers()), batch=lambda n: ((batch(n)[0],), batch(n)[1])),
     replace(BASE, module=lambda: nn.Sequential(Unpacked(), *layers())),
     r"inputs of \[0\] float32 \(n, 8\), not float32 \(n, 8\)"),
    (BASE, replace(BASE, precision="mixed-bfloat16"), "float32, not mixed-bfloat16"),
    (BASE, replace(BASE, loss=F.smooth_l1_loss), "another loss"),
    (BASE, replace(BASE, loss=lambda y, t: F.mse_loss(y, t) + 0.5 * y.pow(2).mean()), "another loss"),
    (replace(BASE, optimizer=ADAM), BASE, "AdamW, not SGD"),
    (BASE, replace(BASE, optimizer=SGD), "SGD with momentum=nonzero, not momentum=0"),
    (BASE, replace(BASE, optimizer=partial(SGD, momentum=0.9, nesterov=True)), "nesterov=False, not nesterov=True"),
    (BASE, replace(BASE, optimizer=partial(SGD, momentum=0.9, weight_decay=0.1)), "weight_decay=0, not weight_decay"),
    *((replace(BASE, optimizer=ADAM), replace(BASE, optimizer=partial(ADAM, **{name: True})), f"{name}=.*, not {name}=")
      for name in ("amsgrad", "maximize", "foreach")),
    (BASE, replace(BASE, groups=no_decay), "other parameter groups"),
]  # fmt: skip


@pytest.mark.sample(12)
@pytest.mark.parametrize(("task", "other", "says"), OTHERS, ids=[says for *_, says in OTHERS])
def test_a_plan_for_another_task_is_refused_in_words(task: Task, other: Task, says: str) -> None:
    """The dry run and training refuse it before anything runs."""
    plan = in_one_stage(task)
    for run in (certify, Trainer):
        with pytest.raises(
            FileError, match=f"does not belong to this task: it was made for .*{says}.*plan this task"
        ):
            run(other, plan)


@pytest.mark.parametrize("task", list(dict.fromkeys(task for task, *_ in OTHERS)))
def test_a_plan_is_for_its_own_task(task: Task) -> None:
    """Both accept the plan."""
    for run in (certify, Trainer):
        run(task, in_one_stage(task))


SAME = {
    "learning rate": replace(BASE, optimizer=partial(torch.optim.SGD, lr=1e-4, momentum=0.5)),
    "weights": replace(BASE, module=lambda: (torch.manual_seed(7), layers())[1]),
    "existing module": replace(BASE, module=layers()),
    "scheduler": replace(BASE, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)),
    "name": replace(BASE, name="other"),
}


@pytest.mark.parametrize("task", SAME.values(), ids=SAME)
def test_what_no_cost_depends_on_is_left_out(task: Task) -> None:
    """Learning rate, weights, scheduler and name change neither the fingerprint nor the costs."""
    assert of(task) == of(BASE)
    assert profile_of(task, 2).measurements == profile_of(BASE, 2).measurements


def test_tasks_of_one_fingerprint_cost_the_same() -> None:
    """For all tasks here, if fingerprints and sizes are equal, so are all profiled costs."""
    tasks = [BASE, TRACED, *SAME.values(), *(other for _, other, _ in OTHERS)]
    met: dict[object, object] = {}
    for task in tasks:
        made = profile_of(task, 2)
        key = made.fingerprint, made.measurements[0].sizes
        assert met.setdefault(key, made.measurements) == made.measurements
    assert len(met) > 20


class Counting(nn.Linear):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_what_profiling_itself_changes_is_left_out() -> None:
    """The profiler calls a layer that counts its calls; the plan still matches the task."""
    task = replace(BASE, module=lambda: nn.Sequential(Counting()))
    for run in (certify, Trainer):
        run(task, plan_of(task, [1]))


def test_several_differences_are_all_told() -> None:
    """Optimizer and inputs are both described; many layers are counted."""
    one = of(BASE)
    other = replace(one, inputs=("float32 (n, 9)",), optimizer="AdamW", layers=("?",) * 5)
    assert differences(one, one, "abcde") == []
    assert differences(one, other, "abcde") == [
        "another class, other settings or other operations in layers a, b, c and 2 more",
        "inputs of float32 (n, 8), not float32 (n, 9)",
        "SGD, not AdamW",
    ]


def test_inputs_are_told_with_their_places() -> None:
    """The order of a dictionary does not matter; a setting among the inputs, and memory order, do."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return self.linear(x) * scale

    def task(make: Callable[[int], object]) -> Task:
        return replace(BASE, module=Scaled, batch=lambda size: (make(size), torch.randn(size, 3, 4)))

    one = of(task(lambda n: {"x": torch.randn(n, 3, 8), "scale": 2.0}))
    assert one.inputs == ("['scale'] 2.0", "['x'] float32 (n, 3, 8)")
    assert of(task(lambda n: {"scale": 2.0, "x": torch.randn(n, 3, 8)})) == one
    assert of(task(lambda n: {"x": torch.randn(n, 3, 8), "scale": 3.0})).inputs[0] == "['scale'] 3.0"
    turned = of(task(lambda n: {"x": torch.randn(n, 8, 3).transpose(1, 2), "scale": 2.0}))
    assert turned.inputs[1] == "['x'] float32 (n, 3, 8), dimensions in memory in the order (0, 2, 1)"


class Words(nn.Module):
    """A model that embeds tokens and labels them; its parameters and operations do not depend on the
    length.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens: Tensor, more: Tensor) -> Tensor:
        return self.head(self.embed(tokens).mean(1) + self.embed(more).mean(1))


def of_length(*lengths: int) -> Task:
    """Return sequences of tokens of two lengths."""

    def batch(size: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens, more = (torch.randint(16, (size, length)) for length in lengths)
        return {"tokens": tokens, "more": more}, torch.randint(16, (size,))

    return replace(BASE, module=Words, batch=batch, loss=F.cross_entropy)


def test_lengths_are_told_and_checked() -> None:
    """A plan prints the length of its sequences; a task, or a batch, of another length is refused."""
    assert of(of_length(6, 4)).lengths == (4, 6)
    task = of_length(6, 6)
    plan = in_one_stage(task)
    assert "microbatches of 2 samples of length 6, float32" in " ".join(text(plan).split())
    for run in (certify, Trainer):
        with pytest.raises(
            FileError, match=r"it was made for samples of length 6, not lengths 4 and 6\. Profile and"
        ):
            run(of_length(6, 4), plan)
    trainer, size = Trainer(task, plan), plan.training.batch_size
    trainer.step(task.batch(size))
    with pytest.raises(
        UsageError, match=r"tensor 1 of the inputs .* \(n, 4\), but the plan expects \(n, 6\)"
    ):
        trainer.step(of_length(6, 4).batch(size))


def test_samples_without_lengths_are_counted_alone() -> None:
    """Numbers that are not a sequence of integers have no length."""
    plan = in_one_stage(BASE)
    assert plan.profile.fingerprint.lengths == () and "microbatches of 2, float32" in " ".join(
        text(plan).split()
    )


def test_a_stage_trained_alone_belongs_to_its_task_too(tmp_path: Path) -> None:
    """Trimmed profiling of another task than the profile's is refused."""
    made = profile(BASE, microbatch_size=2)
    training = Training(batch_size=4, microbatches=2, schedule="gpipe")
    cluster = plan_of(BASE, [5]).cluster
    with pytest.raises(FileError, match="made for SGD, not AdamW"):
        profile_trimmed(replace(BASE, optimizer=ADAM), made, cluster, training, store=tmp_path / "runs.json")
