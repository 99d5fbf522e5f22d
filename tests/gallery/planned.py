"""Training by random plans, all devices in this process, with all computed numbers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from gallery import MODELS
from gallery.model import Model
from gallery.plain import Draws, Step
from pipefit.capture import Task
from pipefit.capture.model import build_chain
from pipefit.runtime import Trainer
from pipefit.runtime.engine.stage import StageRunner
from pipefit.schema.actions import Action
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import Trace
from support.known_profiles import profile
from support.random_trainings import random_plan

SEED, STEPS = 7, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model with an existing module, which tests copy before training, and its costs."""

    model: Model
    task: Task
    profile: ModelProfile
    draws: tuple[int, ...]  # the layers of the random operations of one microbatch, in order

    @property
    def module(self) -> nn.Module:
        """Return the untrained module."""
        assert isinstance(self.task.module, nn.Module)
        return self.task.module

    def copied(self) -> Task:
        """Return the task, with a copy of the untrained module."""
        return replace(self.task, module=copy.deepcopy(self.module))

    def plans(self) -> list[Plan]:
        """Return random plans, one without and one with recomputation if possible."""
        rng = Random(self.model.name)
        kept = replace(random_plan(self.profile, rng, microbatches=rng.choice([1, 2, 3])), decisions=())
        again = [random_plan(self.profile, rng, microbatches=rng.choice([2, 3])) for _ in range(40)]
        once = {number for number, cost in enumerate(self.profile.measurements[0].costs) if cost.unrepeatable}
        recomputed = [plan for plan in again if plan.decisions and not once & recomputed_layers(plan)][:1]
        return recomputed or [kept] if self.model.is_large else [kept, *recomputed]

    def batches(self, plan: Plan) -> list[Any]:
        """Return the batches of all steps."""
        torch.manual_seed(SEED)
        return [self.model.batch(plan.training.batch_size) for _ in range(STEPS)]


def recomputed_layers(plan: Plan) -> set[int]:
    """Return the recomputed layers of a plan."""
    return {
        layer for decision in plan.decisions for layer in range(decision.layers[0], decision.layers[-1] + 1)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Training by a plan: every step's numbers, and the meters' readings."""

    plan: Plan
    steps: list[Step]
    trace: Trace


@lru_cache(maxsize=1)
def prepared(name: str) -> Prepared:
    """Return the model of that name, for all its tests, which run one after the other."""
    model = MODELS[name]
    torch.manual_seed(1)
    task = replace(model.task(), module=model.module())
    found = profile(task, microbatch_size=model.size)
    return Prepared(model=model, task=task, profile=found, draws=draws_of(task, model))


def draws_of(task: Task, model: Model) -> tuple[int, ...]:
    """Return the layer of each of a microbatch's random operations; those of the loss count as another
    layer's.
    """
    chain = build_chain(replace(task, module=copy.deepcopy(task.module)), model.size)
    (inputs, targets), found = model.batch(model.size), []
    values = tuple(value.clone() for value in chain.flatten(inputs))
    for number, layer in enumerate(chain.layers):
        with Draws() as draws:
            values = layer(values)
        found += [number] * draws.count
    with Draws() as draws:
        chain.loss(values, chain.flatten_targets(targets))
    return (*found, *[len(chain.layers)] * draws.count)


@lru_cache(maxsize=1)
def trained(name: str) -> list[Run]:
    """Return the model of that name, trained by each of its plans on emulated devices with meters."""
    found = prepared(name)
    return [train(found, plan) for plan in found.plans()]


def train(found: Prepared, plan: Plan) -> Run:
    """Train by `plan`, and read all numbers outside the meters."""
    trainer, update, steps = Trainer(found.copied(), plan, seed=SEED), StageRunner.step, list[Step]()
    names = first_names(found.module)
    for batch in found.batches(plan):
        seen: dict[str, np.ndarray] = {}

        def watched(runner: StageRunner, action: Action, seen: dict[str, np.ndarray] = seen) -> None:
            for layer in runner.layers:
                for local, parameter in layer.module.named_parameters():
                    if parameter.grad is not None:
                        seen[names[layer.originals[local]]] = parameter.grad.numpy().copy()
            update(runner, action)

        with mock.patch.object(StageRunner, "step", watched):
            trainer.step(batch)
        (losses,) = [stage.losses for stage in trainer.stages if stage.losses is not None]
        gradients = {name: torch.from_numpy(gradient) for name, gradient in seen.items()}
        state = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        steps.append(Step(losses=losses.tolist(), gradients=gradients, state=state))
    return Run(plan=plan, steps=steps, trace=trainer.trace)


def first_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each named parameter."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first.setdefault(parameter, name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
