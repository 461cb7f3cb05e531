"""Hugging Face Trainer: one argument brings the optimizer. Under torchrun Trainer wraps the model in DDP.

torchrun --standalone --nproc-per-node 2 examples/trainer.py
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import dmuon

STEPS, LENGTH = 30, 64

text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()  # it reads itself
windows = text.unfold(0, LENGTH, 8)
data = [{"input_ids": window, "labels": window} for window in windows]


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **others):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.3f}")


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)  # fmt: skip
trainer = Trainer(
    LlamaForCausalLM(config),
    TrainingArguments(
        output_dir="runs/trainer",
        max_steps=STEPS,
        per_device_train_batch_size=8,
        logging_steps=5,
        save_steps=STEPS,  # the optimizer is in the checkpoint: trainer.train(resume_from_checkpoint=True) goes on
        lr_scheduler_type="cosine",
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=data,
    callbacks=[Print()],
    optimizer_cls_and_kwargs=(lambda: dmuon.Muon, {"lr": 0.01, "weight_decay": 0.1}),
)
trainer.train()
