"""accelerate with FSDP2. On the CPU accelerate has no FSDP and takes DDP; the loop is the same.

torchrun --standalone --nproc-per-node 2 examples/accelerate_fsdp2.py
"""

from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM

import dmuon

STEPS, LENGTH = 40, 64

text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()  # it reads itself
data = [{"input_ids": window, "labels": window} for window in text.unfold(0, LENGTH, 2)]

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
)
cuda = torch.cuda.is_available()
accelerator = Accelerator(fsdp_plugin=plugin if cuda else None, cpu=not cuda)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = dmuon.Muon(model, lr=0.01)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for step, batch in zip(range(STEPS), loader, strict=False):
    loss = model(**batch).loss
    optimizer.zero_grad()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if accelerator.is_main_process and (step % 10 == 0 or step == STEPS - 1):
        print(f"step {step} loss {loss.item():.3f}")

accelerator.save_state("runs/accelerate")
accelerator.wait_for_everyone()
accelerator.load_state("runs/accelerate")
accelerator.end_training()
