"""A loop like nanoGPT's: fused queries, keys and values, DDP, accumulation, rates by hand, one rank saves.

torchrun --standalone --nproc-per-node 2 examples/nanogpt.py
"""

import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dmuon

STEPS, WIDTH, HEAD, LENGTH, MICRO_BATCHES, LR = 40, 64, 16, 64, 2, 0.01


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_embd = WIDTH
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(attended.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), CausalSelfAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 256, bias=False)
        self.wte.weight = self.lm_head.weight  # tied
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(LENGTH, device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()  # it reads itself


def batch(rows=8):
    start = torch.randint(len(text) - LENGTH, (rows, 1))
    window = text[start + torch.arange(LENGTH + 1)]
    return window[:, :-1].to(device), window[:, 1:].to(device)


def loss_of(model):
    tokens, targets = batch()
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


cuda = torch.cuda.is_available()
device = "cuda" if cuda else "cpu"
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same weights on every rank
model = DistributedDataParallel(GPT().to(device))
optimizer = dmuon.Muon(model, lr=LR)  # c_attn is three matrices, in a class of this name
rates = [group["lr"] for group in optimizer.param_groups]

torch.manual_seed(1 + rank)  # other data on every rank
for step in range(STEPS):
    factor = min((step + 1) / 5, 0.55 + 0.45 * math.cos(math.pi * step / STEPS))  # warm-up, then a cosine
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    for micro in range(MICRO_BATCHES):
        model.require_backward_grad_sync = micro == MICRO_BATCHES - 1
        loss = loss_of(model)
        (loss / MICRO_BATCHES).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step % 10 == 0 or step == STEPS - 1):
        print(f"step {step} loss {loss.item():.3f}")

moments = optimizer.state_dict()  # on every rank
if rank == 0:
    Path("runs").mkdir(exist_ok=True)
    torch.save({"model": model.module.state_dict(), "optimizer": moments}, "runs/nanogpt.pt")
dist.destroy_process_group()
