"""Experts as stacks (e, out, in) over an expert-parallel mesh, everything else under FSDP2.

Each rank has some experts whole, so that nothing of them travels in step(). Tokens do, to their expert and back.

torchrun --standalone --nproc-per-node 2 examples/moe_expert_parallel.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import dmuon

STEPS, WIDTH, LENGTH, EXPERTS = 40, 64, 64, 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * (2 * WIDTH) ** -0.5)

    def shard(self, mesh):
        """Each rank keeps its experts. Their gradients are sums over ranks; others' are means."""
        self.group = mesh.get_group()
        for name in ("up", "down"):
            part = nn.Parameter(distribute_tensor(getattr(self, name).data, mesh, [Shard(0)]))
            part.register_hook(lambda grad: grad / world)
            setattr(self, name, part)

    def forward(self, x):
        weight, expert = self.router(x).softmax(-1).max(-1)  # one expert for each token
        order = expert.argsort()
        sent = expert.bincount(minlength=EXPERTS)
        received = torch.empty_like(sent)  # of my experts, from each rank
        dist.all_to_all_single(received, sent, group=self.group)
        out_sizes, in_sizes = (n.view(world, -1).sum(1).tolist() for n in (received, sent))
        tokens = all_to_all_single_autograd(x[order], out_sizes, in_sizes, self.group)
        up, down = self.up.to_local(), self.down.to_local()
        mine = torch.arange(len(up), device=x.device).repeat(world).repeat_interleave(received)
        results = torch.zeros_like(tokens)
        for i in range(len(up)):
            at = (mine == i).nonzero().squeeze(1)
            results = results.index_copy(0, at, F.gelu(tokens[at] @ up[i].T) @ down[i].T)
        back = all_to_all_single_autograd(results, in_sizes, out_sizes, self.group)
        return weight[:, None] * torch.zeros_like(x).index_copy(0, order, back)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.experts = Experts()

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = self.q(h)[:, None], self.k(h)[:, None], self.v(h)[:, None]
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return x + self.experts(self.norm2(x).flatten(0, 1)).view_as(x)


text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()  # it reads itself


def batch(rows=8):
    start = torch.randint(len(text) - LENGTH, (rows, 1))
    window = text[start + torch.arange(LENGTH + 1)]
    return window[:, :-1].to(device), window[:, 1:].to(device)


cuda = torch.cuda.is_available()
device = "cuda" if cuda else "cpu"
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device, (world,), mesh_dim_names=("ep",))

torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(nn.Embedding(256, WIDTH), Block(), Block(), nn.Linear(WIDTH, 256, bias=False)).to(device)
for block in model[1:3]:
    block.experts.shard(mesh)
stacks = {p for block in model[1:3] for p in (block.experts.up, block.experts.down)}
for block in model[1:3]:
    fully_shard(block, mesh=mesh, ignored_params=stacks)
fully_shard(model, mesh=mesh, ignored_params=stacks)
optimizer = dmuon.Muon(model, lr=0.01, exclude=["*.router"])  # each expert is a matrix

torch.manual_seed(1 + rank)  # other data on every rank
for step in range(STEPS):
    tokens, targets = batch()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    dmuon.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if rank == 0 and (step % 10 == 0 or step == STEPS - 1):
        print(f"step {step} loss {loss.item():.3f}")
dist.destroy_process_group()
