"""HSDP: replicas of shards, dedicated. One rank of all owns a matrix, however many replicas there are.

torchrun --standalone --nproc-per-node 2 examples/hsdp.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon

STEPS, WIDTH, HEAD, LENGTH = 40, 64, 16, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


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
shards = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", world)) // 2)  # usually the GPUs of one host
mesh = init_device_mesh(device, (world // shards, shards), mesh_dim_names=("replicate", "shard"))

torch.manual_seed(0)  # the same weights on every rank
model = Model().to(device)
dmuon.dedicate_params(model, mesh)  # leave this line out, and matrices are exchanged in step() instead
for block in model.blocks:
    dmuon.fully_shard(block, mesh=mesh)
dmuon.fully_shard(model, mesh=mesh)
optimizer = dmuon.Muon(model, lr=0.01)

torch.manual_seed(1 + rank)  # other data on every rank
for step in range(STEPS):
    loss = loss_of(model)
    optimizer.zero_grad()
    loss.backward()
    dmuon.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if rank == 0 and (step % 10 == 0 or step == STEPS - 1):
        print(f"step {step} loss {loss.item():.3f}")
dist.destroy_process_group()
