"""Plans for Hugging Face's Trainer and Lightning's: their peak is the certified one, their losses are theirs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pipefit.errors import UsageError
from pipefit.own_loop import apply
from support.own_loop_oracle import bytes_of, peaks_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.usefixtures("one_thread")


class Sentences(Dataset[dict[str, Tensor]]):
    """Made-up sentences of 32 tokens."""

    def __init__(self) -> None:
        self.ids = torch.randint(90, (64, 32), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=90,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def with_adapters() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def trainer_of(model: Any, folder: Path, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        max_steps=3,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )
    return transformers.Trainer(model, arguments, train_dataset=Sentences())


def peak_of(run: Any, module: nn.Module) -> int:
    """Return the peak of a whole training by the allocator's events."""

    def marked() -> None:
        with record_function("training"):
            run()

    return peaks_of(marked, bytes_of([*module.parameters(), *module.buffers()]), "training")[0]


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (llama, {}),
        (llama, {"bf16": True, "gradient_accumulation_steps": 2}),
        (with_adapters, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}),
    ],
    ids=["plain", "bf16 and accumulation", "adapters without clipping"],
)
def test_a_hugging_face_trainer_has_the_certified_peak(build: Any, options: Any, tmp_path: Path) -> None:
    """One line plans a Trainer: peak to the byte, and losses as without the plan."""
    plain = trainer_of(build(), tmp_path, **options)
    plain_peak = peak_of(plain.train, plain.model)

    planned = trainer_of(build(), tmp_path, **options)
    handle = apply(planned.model, budget=int(plain_peak * 0.75), step=planned)
    assert max(handle.plan.plain_bytes) == plain_peak
    assert handle.plan.decisions
    assert peak_of(planned.train, planned.model) == max(handle.plan.peak_bytes) <= plain_peak * 0.75
    assert losses(planned) == losses(plain)


@pytest.mark.gallery
def test_a_trainer_of_trl_has_the_certified_peak(tmp_path: Path) -> None:
    """TRL's SFTTrainer is planned like the Trainer from which it derives."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(88)} | {"<pad>": 88, "<eos>": 89}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )

    def made() -> Any:
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8,
            max_steps=3,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            gradient_checkpointing=False,
            bf16=False,
            max_length=32,
        )
        data = datasets.Dataset.from_dict({"input_ids": Sentences().ids.clamp(max=87).tolist()})
        return trl.SFTTrainer(model=llama(), args=arguments, train_dataset=data, processing_class=tokenizer)

    plain, planned = made(), made()
    plain_peak = peak_of(plain.train, plain.model)
    handle = apply(planned.model, budget=int(plain_peak * 0.98), step=planned)
    assert max(handle.plan.plain_bytes) == plain_peak
    assert handle.plan.decisions
    assert peak_of(planned.train, planned.model) == max(handle.plan.peak_bytes) <= plain_peak * 0.98
    assert losses(planned) == losses(plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_checkpointing": True}, "_checkpointing=True"),
        ({"other": True}, "trainer.model"),
    ],
    ids=["checkpointing", "another model"],
)
def test_trainers_that_are_refused(options: Any, message: str, tmp_path: Path) -> None:
    """What the dry run would not see is refused by name."""
    other = options.pop("other", False)
    trainer = trainer_of(llama(), tmp_path, **options)
    with pytest.raises(UsageError, match=message):
        apply(llama() if other else trainer.model, budget="1 GiB", step=trainer)


def test_trainers_on_several_ranks_are_refused(tmp_path: Path) -> None:
    """A trainer wraps the model when it starts, after the plan."""
    trainer = trainer_of(llama(), tmp_path)
    with (
        mock.patch.object(type(trainer.args), "world_size", 2),
        pytest.raises(UsageError, match=r"2 ranks.*fully_shard"),
    ):
        apply(trainer.model, budget="1 GiB", step=trainer)


def test_other_objects_are_no_trainer() -> None:
    """A step is a function or a Trainer."""
    with pytest.raises(UsageError, match="a function of a batch, or a Trainer"):
        apply(nn.Linear(1, 1), budget="1 GiB", batch=torch.ones(1), step=object())


# ---- Lightning


@pytest.fixture(scope="module")
def lightning() -> Any:
    package = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return package


def residual(lightning: Any) -> Any:
    """Return a LightningModule of residual blocks."""

    class Residual(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(16, 64), nn.Linear(64, 1)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)
            )
            self.losses: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = x + block(x)
            return self.leave(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    torch.manual_seed(0)
    return Residual()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value", "precision": "bf16-mixed"},
    ],
    ids=["plain", "clipped norm and accumulation", "clipped values and bf16"],
)
def test_a_lightning_trainer_has_the_certified_peak(lightning: Any, options: Any) -> None:
    """The step is Lightning's: gradients are freed between forward and backward."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(1024, 16), torch.randn(1024, 1))

    def made() -> Any:
        return lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )

    plain, planned = residual(lightning), residual(lightning)
    plain_peak = peak_of(lambda: made().fit(plain, DataLoader(data, 256)), plain)
    trainer = made()
    handle = apply(planned, budget=int(plain_peak * 0.8), batch=tuple(data[:256]), step=trainer)
    planned.losses.clear()
    assert max(handle.plan.plain_bytes) == plain_peak
    assert peak_of(lambda: trainer.fit(planned, DataLoader(data, 256)), planned) == max(
        handle.plan.peak_bytes
    )
    assert planned.losses == plain.losses
