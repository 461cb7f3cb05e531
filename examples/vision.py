"""A small ResNet under DDP: a kernel (out, in, k, k) is the matrix (out, in * k * k) for Muon.

torchrun --standalone --nproc-per-node 2 examples/vision.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dmuon

STEPS, CLASSES, SIZE = 40, 8, 16


class Block(nn.Module):
    def __init__(self, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width // stride, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(width // stride, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.layers = nn.Sequential(Block(16, 1), Block(32, 2), Block(64, 2))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.head(self.layers(F.relu(self.stem(x))).mean((2, 3)))


def batch(rows=16):
    """Stripes under noise; their direction is the class."""
    labels = torch.randint(CLASSES, (rows,))
    angle = (labels * torch.pi / CLASSES)[:, None, None]
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    stripes = torch.sin(x * angle.cos() + y * angle.sin() + 6.28 * torch.rand(rows, 1, 1))
    images = stripes[:, None] + 0.3 * torch.randn(rows, 3, SIZE, SIZE)
    return images.to(device), labels.to(device)


cuda = torch.cuda.is_available()
device = "cuda" if cuda else "cpu"
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same weights on every rank
model = DistributedDataParallel(ResNet().to(device))
optimizer = dmuon.Muon(model, lr=0.01)  # stem and head stay on AdamW

torch.manual_seed(1 + rank)  # other data on every rank
for step in range(STEPS):
    images, labels = batch()
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and (step % 10 == 0 or step == STEPS - 1):
        print(f"step {step} loss {loss.item():.3f}")
dist.destroy_process_group()
