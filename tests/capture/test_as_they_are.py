"""Hugging Face models train to the numbers of a plain loop, without changes to the model."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BatchEncoding

from pipefit.capture import Task, capture
from pipefit.capture.sample import sample
from pipefit.errors import UsageError
from pipefit.profiler import profile
from pipefit.runtime import Trainer
from pipefit.schema.plan import Plan
from support.pretrained_models import PRETRAINED, REFUSED, WORDS, Inputs, language, tokens, transcribed
from support.random_trainings import random_plan

STEPS, SIZE, COUNT = 3, 2, 2
SAMPLE = ("gpt2",)  # the others take a minute
NAMES = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.gallery) for name in PRETRAINED]
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


# Sums do not depend on the number of cores
pytestmark = pytest.mark.usefixtures("one_thread")


def batches(inputs: Any, *, count: int = STEPS) -> list[Inputs]:
    """Return keyword arguments for every step."""
    found = []
    for step in range(count):
        torch.manual_seed(step)
        found.append(inputs(SIZE * COUNT))
    return found


def microbatches(batch: Inputs) -> Iterator[Inputs]:
    """Split the batch into microbatches; flags are the same in all of them."""
    for start in range(0, SIZE * COUNT, SIZE):
        yield {
            name: item[start : start + SIZE] if isinstance(item, Tensor) else item
            for name, item in batch.items()
        }


def trained_plainly(module: nn.Module, steps: list[Inputs], *, last_first: bool) -> list[float]:
    """Return the losses of a plain loop over microbatches that calls the module and its own loss."""
    optimizer, means = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9), []
    for batch in steps:
        losses = [module(**inputs).loss for inputs in microbatches(batch)]
        for loss in reversed(losses) if last_first else losses:
            (loss / COUNT).backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(torch.stack([loss.detach() for loss in losses]).mean().item())
    return means


def tolerance(plan: Plan) -> dict[str, float]:
    """Return the tolerance: bitwise, unless stages add up the gradients of a shared parameter."""
    shared = plan.measurement.shared and len(plan.stages) > 1
    return {"rtol": 1e-3, "atol": 1e-5} if shared else {"rtol": 0.0, "atol": 0.0}


@pytest.mark.filterwarnings("ignore:peaks do not include")  # of operators of transformers
@pytest.mark.parametrize("name", NAMES)
def test_trained_as_it_is(name: str) -> None:
    """A model with its default configuration and its own loss trains as in a plain loop and keeps its
    settings.
    """
    made = PRETRAINED[name]
    ours, theirs = made.build(), made.build()
    before = repr(ours.config)
    task = Task(ours, batch=lambda size: (made.inputs(size), None), loss=None, optimizer=SGD)
    plan = random_plan(profile(task, microbatch_size=SIZE), Random(name), microbatches=COUNT)
    trainer, steps = Trainer(task, plan), batches(made.inputs)
    losses = [trainer.step((batch, None)) for batch in steps]
    expected = trained_plainly(theirs, steps, last_first=plan.training.schedule == "torchgpipe")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0.0)
    trained = trainer.state_dict()
    assert trained.keys() == theirs.state_dict().keys()
    for key, tensor in theirs.state_dict().items():
        torch.testing.assert_close(
            trained[key], tensor, **tolerance(plan), msg=lambda text, key=key: f"{key}: {text}"
        )
    assert repr(ours.config) == before


def test_the_cache_is_no_part_of_training() -> None:
    """No layer computes a cache: the code equals that of a model whose configuration disables it."""
    codes = []
    for use_cache in (True, False):
        model = PRETRAINED["gpt2"].build()
        model.config.use_cache = use_cache
        task = Task(model, batch=lambda size: (language(size), None), loss=None)
        codes.append([layer.module.pipefit_code.text for layer in capture(task, *sample(task, SIZE)).layers])
        assert model.config.use_cache is use_cache
    assert codes[0] == codes[1]


def test_a_loss_of_ones_own() -> None:
    """An external loss receives the model's output class; a batch may be a tokenizer's result."""
    ours = PRETRAINED["gpt2"].build()
    theirs = copy.deepcopy(ours)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        assert type(outputs).__name__ == "CausalLMOutputWithCrossAttentions"
        return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())

    def batch(size: int) -> tuple[BatchEncoding, Tensor]:
        found = language(size)
        return BatchEncoding({"input_ids": found["input_ids"]}), found["labels"]

    task = Task(ours, batch=batch, loss=loss, optimizer=SGD)
    plan = random_plan(profile(task, microbatch_size=SIZE), Random(3), microbatches=1)
    torch.manual_seed(0)
    inputs, targets = batch(SIZE)
    found = Trainer(task, plan).step((inputs, targets))
    expected = F.cross_entropy(theirs(inputs["input_ids"]).logits.flatten(0, 1), targets.flatten())
    assert found == pytest.approx(expected.item(), rel=1e-6)


def test_a_loss_that_reads_the_cache_is_refused() -> None:
    """An external loss does not receive the cache, and later entries of a tuple keep their positions."""
    model = PRETRAINED["gpt2"].build()

    def task(loss: Any, **options: Any) -> Task:
        return Task(
            model,
            batch=lambda size: ({"input_ids": tokens(size), **options}, torch.zeros(size)),
            loss=loss,
            name="GPT",
        )

    with pytest.raises(UsageError, match=r"the loss of GPT cannot be run.*no attribute 'layers'"):
        profile(
            task(lambda outputs, _: outputs.past_key_values.layers[0].keys.mean(), use_cache=True),
            microbatch_size=1,
        )
    third = task(lambda outputs, _: outputs[2][0].mean(), output_hidden_states=True, return_dict=False)
    assert profile(third, microbatch_size=1).measurements


def packed(samples: int) -> Inputs:
    """Return samples of two packed texts, each with its own positions."""
    found = language(samples)
    starts = torch.randint(3, 9, (samples, 1))
    positions = torch.arange(12).expand(samples, -1)
    return {**found, "position_ids": torch.where(positions < starts, positions, positions - starts)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences_train_as_in_a_plain_loop(name: str, use_cache: bool) -> None:
    """Whether texts in one sample see each other depends on the cache, as in a plain loop."""
    found = PRETRAINED[name].build()
    found.config.use_cache = use_cache
    assert_traced_as_it_runs(found, packed)


def assert_traced_as_it_runs(module: nn.Module, inputs: Any) -> None:
    """Assert that a module's chain has the loss and gradients of the module, bit by bit."""
    task = Task(module, batch=lambda size: (inputs(size), None), loss=None)
    torch.manual_seed(1)
    batch = inputs(SIZE)
    chain = capture(task, batch)
    assert not any(block.undivided for block in chain.blocks)
    values = chain.flatten(batch)
    for layer in chain.layers:
        values = layer(values)
    loss = chain.loss(values, chain.flatten_targets(None))
    loss.backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    expected = module(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-7)


class Renamed(nn.Module):
    """A model that passes on its positions under another name, or creates them."""

    def __init__(self, texts: int | None) -> None:
        super().__init__()
        self.inner, self.texts = PRETRAINED["llama"].build(), texts

    def forward(self, words: Tensor, places: Tensor) -> Any:
        """Return the loss of the inner model."""
        if self.texts:
            places = torch.arange(words.shape[1]).expand_as(words) % (words.shape[1] // self.texts)
        return self.inner(input_ids=words, position_ids=places, labels=words, use_cache=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("texts", [None, 1, 2])
def test_positions_of_any_origin_separate_packed_sequences(texts: int | None) -> None:
    """Positions under another name, and constant positions that restart, count as positions too."""

    def inputs(size: int) -> Inputs:
        found = packed(size)
        return {"words": found["input_ids"], "places": found["position_ids"]}

    assert_traced_as_it_runs(Renamed(texts), inputs)


def test_keys_and_values_that_layers_share_come_from_the_cache() -> None:
    """Layers that share keys and values with other layers find them in the cache, as in a plain loop."""
    settings: Any = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": WORDS,
        "head_dim": 16,
    }
    made = PRETRAINED["llama"]
    made = made._replace(kind="Gemma4ForCausalLM", settings={**made.settings, **settings})
    assert_traced_as_it_runs(made.build(), packed)


def test_attention_that_cannot_be_followed_is_named() -> None:
    """Flexible attention is refused with the line and a kind of attention that can be traced."""
    model = PRETRAINED["llama"].build()
    model.set_attn_implementation("flex_attention")  # type: ignore[operator]
    task = Task(model, batch=lambda size: (language(size), None), loss=None)
    with pytest.raises(UsageError, match=r"self_attn .*\.py:\d+.*set_attn_implementation\('sdpa'\)"):
        capture(task, *sample(task, SIZE))


def test_a_model_inside_ones_own() -> None:
    """A user's module around a Hugging Face model may return anything in addition to its loss."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = PRETRAINED["gpt2"].build(), nn.Linear(WORDS, 3)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            outputs = self.model(input_ids, labels=labels, use_cache=True)
            return {"loss": outputs.loss + self.head(outputs.logits).mean(), "cache": outputs.past_key_values}

    task = Task(Around, batch=lambda size: (language(size), None), loss=None)
    assert "model.transformer.h.1.attn" in [layer.name for layer in capture(task, *sample(task, SIZE)).layers]


def test_outputs_without_names_have_a_loss_too() -> None:
    """A model set to return tuples returns named outputs during the trace, and tuples afterwards."""
    model = PRETRAINED["bert-classes"].build()
    model.config.return_dict = False
    task = Task(model, batch=lambda size: (PRETRAINED["bert-classes"].inputs(size), None), loss=None)
    found = capture(task, *sample(task, SIZE))
    assert found.outputs is not None and model.config.return_dict is False


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("augmented", ("module wav2vec2", "draws random numbers from", "set apply_spec_augment=False")),
        ("ctc", ("modeling_wav2vec2.py:", "leave the labels out of the inputs and give Task(..., loss=...)")),
    ],
)
def test_what_cannot_be_traced_has_a_way_out(name: str, words: tuple[str, ...]) -> None:
    """A refusal names the module, the line, and the setting or argument that makes the model work."""
    made = REFUSED[name]
    task = Task(made.build(), batch=lambda size: (made.inputs(size), None), loss=None)
    with pytest.raises(UsageError) as refused:
        capture(task, *sample(task, SIZE))
    assert all(word in str(refused.value) for word in (*words, ".py:"))


@pytest.mark.gallery
@pytest.mark.filterwarnings("ignore:peaks do not include")  # of the CTC loss
def test_the_way_out_of_labels_that_are_checked() -> None:
    """A CTC loss outside the model trains like the model's own loss in a plain loop."""
    ours, theirs = REFUSED["ctc"].build(), REFUSED["ctc"].build()

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        letters = outputs.logits.log_softmax(-1).transpose(0, 1)
        lengths = (torch.full((len(targets),), size) for size in (len(letters), targets.shape[1]))
        return F.ctc_loss(letters, targets, *lengths)

    def batch(size: int) -> tuple[Inputs, Tensor]:
        found = transcribed(size)
        return {"input_values": found["input_values"]}, found["labels"]

    theirs.config.ctc_loss_reduction = "mean"
    task = Task(ours, batch=batch, loss=loss, optimizer=SGD)
    found = profile(task, microbatch_size=SIZE)
    assert any("_ctc_loss" in kernel.operation for kernel in found.kernels.unknown)
    plan = random_plan(found, Random(1), microbatches=COUNT)
    trainer, steps = Trainer(task, plan), batches(transcribed)
    losses = [trainer.step(({"input_values": step["input_values"]}, step["labels"])) for step in steps]
    expected = trained_plainly(theirs, steps, last_first=plan.training.schedule == "torchgpipe")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0.0)


@pytest.mark.gallery
def test_transformers_is_not_imported() -> None:
    """Capturing a model from another library does not import transformers."""
    code = (
        "import sys, torch; from pipefit.capture import Task, capture; from pipefit.capture.sample import sample\n"
        "task = Task(torch.nn.Bilinear(2, 2, 2), batch=lambda n: ((torch.ones(n, 2), torch.ones(n, 2)), None),"
        " loss=lambda outputs, _: outputs.sum())\n"
        "capture(task, *sample(task, 1)); print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_layers_left_out_at_random_keep_the_encoder_whole() -> None:
    """An encoder that drops layers at random stays one block; the reason gives the line and the setting to
    change.
    """
    made = REFUSED["wav2vec2"]
    module = made.build()
    module.config.apply_spec_augment = False
    task = Task(module, batch=lambda size: (made.inputs(size), None), loss=None)
    (told,) = filter(None, (block.undivided for block in capture(task, *sample(task, SIZE)).blocks))
    assert "wav2vec2.encoder stays whole (" in told and ".py:" in told
    assert told.endswith(": set layerdrop=0.0 in the model's config, if it need not")
