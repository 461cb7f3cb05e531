"""Lightning under DDP: configure_optimizers returns the optimizer. Each matrix has one owner.

torchrun --standalone --nproc-per-node 2 examples/lightning_ddp.py
"""

import os
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from torch import nn

import dmuon

STEPS, WIDTH, CONTEXT = 40, 64, 8

text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()  # it reads itself


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """The next character from the last ones."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH // CONTEXT)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, window, number):
        loss = F.cross_entropy(self.model(window[:, :-1]), window[:, -1])
        if number % 10 == 0 or number == STEPS - 1:
            self.print(f"step {number} loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self):
        return dmuon.Muon(self.model, lr=0.005)


torch.manual_seed(0)
trainer = lightning.Trainer(
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    accelerator="auto",
    strategy="ddp",
    max_steps=STEPS,
    gradient_clip_val=1.0,
    logger=False,
    enable_progress_bar=False,
    enable_checkpointing=False,
)
loader = torch.utils.data.DataLoader(list(text.unfold(0, CONTEXT + 1, 1)) * 3, batch_size=64, shuffle=True)
trainer.fit(Task(), loader)
trainer.save_checkpoint("runs/lightning_ddp.ckpt")  # trainer.fit(model, loader, ckpt_path=…) goes on from it
