"""LoRA by peft: Muon takes the adapters, and what is frozen costs nothing.

torchrun --standalone --nproc-per-node 2 examples/lora.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import dmuon

STEPS, LENGTH = 40, 64

text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()  # it reads itself


def batch(rows=8):
    start = torch.randint(len(text) - LENGTH + 1, (rows, 1))
    return text[start + torch.arange(LENGTH)].to(device)


def base_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).to(device)  # a real one comes from from_pretrained


cuda = torch.cuda.is_available()
device = "cuda" if cuda else "cpu"
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")
rank = dist.get_rank()

settings = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"])
model = DistributedDataParallel(get_peft_model(base_model(), settings))
optimizer = dmuon.Muon(model, lr=0.02, weight_decay=0.0)

torch.manual_seed(1 + rank)  # other data on every rank
for step in range(STEPS):
    tokens = batch()
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if rank == 0 and (step % 10 == 0 or step == STEPS - 1):
        print(f"step {step} loss {loss.item():.3f}")

if rank == 0:
    model.module.save_pretrained("runs/lora")  # the adapters alone
    PeftModel.from_pretrained(base_model(), "runs/lora").merge_and_unload()
dist.barrier()
dist.destroy_process_group()
