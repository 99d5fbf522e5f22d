"""Models that store their parameters under other names and in other shapes, as fused projections do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipefit
from pipefit.capture import stored_entries


class Fused(nn.Module):
    """A projection of three outputs, which is stored as three projections, with a buffer that is not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(8, 24)
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("cache", torch.ones(8), persistent=False)
        self.register_state_dict_post_hook(self._divide)
        self.register_load_state_dict_pre_hook(self._join)

    def forward(self, x: Tensor) -> Tensor:
        """Combine the three outputs."""
        one, two, three = self.fused(x).split(8, dim=-1)
        return x + one.sigmoid() * two * self.scale + three.tanh() * self.cache

    @staticmethod
    def _divide(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for kind in ("weight", "bias"):
            parts = state.pop(f"{prefix}fused.{kind}").detach().chunk(3)
            state.update({f"{prefix}part{n}.{kind}": part.clone() for n, part in enumerate(parts)})

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for kind in ("weight", "bias"):
            names = [f"{prefix}part{n}.{kind}" for n in range(3)]
            if all(name in state for name in names):
                state[f"{prefix}fused.{kind}"] = torch.cat([state.pop(name) for name in names])


class Branching(Fused):
    """The same, with control flow in Python that depends on values, so that it stays whole."""

    def forward(self, x: Tensor) -> Tensor:
        """Combine the three outputs of finite inputs."""
        return super().forward(x) if bool(x.isfinite().all()) else x


def task(kind: type[nn.Module], seed: int = 0) -> pipefit.Task:
    """Return a task of four such modules."""
    torch.manual_seed(seed)
    return pipefit.Task(
        nn.Sequential(*(kind() for _ in range(4))),
        batch=lambda n: (torch.linspace(-1, 1, 8 * n).view(n, 8), torch.ones(n, 8)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    )


def plain(module: nn.Module, batch: tuple[Tensor, Tensor], steps: int) -> dict[str, Tensor]:
    """Train in a plain loop with two microbatches; return the parameters."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for _ in range(steps):
        for x, y in zip(*(values.chunk(2) for values in batch), strict=True):
            (nn.functional.mse_loss(module(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(module.named_parameters())


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Fused, Branching])
def test_a_module_that_stores_other_names_trains_and_continues(kind: type[nn.Module], tmp_path: Path) -> None:
    """Parameters are equal to plain training's after a checkpoint, which has the optimizer state of each of them."""
    own, other = task(kind), task(kind).module
    batch = own.batch(4)
    plan = pipefit.plan(
        own, "emulated:2x16MiB", batch_size=4, microbatches=2, stages=2, data=1, planner="exact"
    )
    trainer = pipefit.Trainer(own, plan)
    trainer.step(batch)
    trainer.save(tmp_path / "saved", background=False)
    again = pipefit.Trainer(task(kind, seed=5), plan)
    again.load(tmp_path / "saved")
    again.step(batch)
    expected = plain(other, batch, 2)
    found = again.state_dict()
    assert {name: tensor for name, tensor in found.items() if "fused" in name}.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert {name for name in found if "scale" in name} and not any("cache" in name for name in found)


@pytest.mark.parametrize("kind", [Fused, Branching])
def test_a_saved_checkpoint_loads_into_the_module(kind: type[nn.Module], tmp_path: Path) -> None:
    """The module's own `load_state_dict` takes the names of parameters."""
    own = task(kind)
    plan = pipefit.plan(
        own, "emulated:2x16MiB", batch_size=4, microbatches=2, stages=2, data=1, planner="exact"
    )
    trainer = pipefit.Trainer(own, plan)
    trainer.step(own.batch(4))
    trainer.save(tmp_path / "saved", background=False)
    module = task(kind, seed=7).module
    module.load_state_dict(pipefit.checkpoints.load_state_dict(tmp_path / "saved"))
    assert all(torch.equal(tensor, trainer.state_dict()[name]) for name, tensor in module.named_parameters())


def test_what_is_stored_is_a_state_dict_before_hooks() -> None:
    """Without hooks it has the entries of the state dict, in their order."""
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    found = stored_entries(module)
    assert list(found) == list(module.state_dict())
    assert all(found[name] is tensor for name, tensor in module.state_dict(keep_vars=True).items())
    assert list(stored_entries(Fused())) == ["scale", "fused.weight", "fused.bias"]
