"""torchtitan's own Llama, small, from the meta device: its optimizer container, schedulers and checkpointer.

torchrun --standalone --nproc-per-node 2 examples/torchtitan_llama.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

from dmuon.integrations.torchtitan import MuonOptimizers

STEPS, LENGTH, FOLDER = 40, 64, "runs/torchtitan_llama"

text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()  # it reads itself


def batch(rows=8):
    start = torch.randint(len(text) - LENGTH, (rows, 1))
    window = text[start + torch.arange(LENGTH + 1)]
    return window[:, :-1].to(device), window[:, 1:].to(device)


def build():
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:  # flex attention is for GPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope.max_seq_len = LENGTH
    with torch.device("meta"):
        model = config.build()
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device(device))
    return model


class Run:
    """The parts of torchtitan's trainer that see the optimizer; there, it is one line of the configuration."""

    def __init__(self):
        self.model = build()
        config = MuonOptimizers.Config(lr=0.005, options={"adamw_lr": 0.002})  # in the place of default_adamw(lr=…)
        self.optimizers = config.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: min(1.0, (step + 1) / 5))
        self.checkpointer = CheckpointManager(
            CheckpointManager.Config(enable=True, folder=FOLDER, interval=STEPS // 2, keep_latest_k=0),
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={},
            sd_adapter=None,
        )

    def step(self):
        tokens, targets = batch()
        self.optimizers.zero_grad()
        loss = cross_entropy_loss(self.model(tokens), targets) / targets.numel()
        loss.backward()
        clip_grad_norm_(list(self.model.parameters()), 1.0)
        self.optimizers.step()
        self.schedulers.step()
        return loss.item()


cuda = torch.cuda.is_available()
device = "cuda" if cuda else "cpu"
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device, (world,))

torch.manual_seed(0)  # the same weights on every rank
run = Run()
torch.manual_seed(1 + rank)  # other data on every rank
for step in range(STEPS):
    if step == STEPS // 2:  # another run goes on from here
        run.checkpointer.save(step)
        run = Run()
        run.checkpointer.load(step)
    loss = run.step()
    if rank == 0 and (step % 10 == 0 or step == STEPS - 1):
        print(f"step {step} loss {loss:.3f}")
dist.destroy_process_group()
