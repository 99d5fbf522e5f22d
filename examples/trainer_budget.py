"""Adapters with Hugging Face's Trainer and a memory budget: three more lines, and the same losses."""

import tempfile

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import pipefit  # 1

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    use_cache=False,
)
model = peft.get_peft_model(
    LlamaForCausalLM(config), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
)
sentences = [{"input_ids": ids, "labels": ids} for ids in torch.randint(100, (80, 32))]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=sentences)
    handle = pipefit.apply(trainer.model, budget="3 MiB", step=trainer)  # 2
    print(handle)  # 3
    trainer.train()

for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"loss {float(entry['loss']):.6f}")
