"""Bytes a rank holds for each parameter of the model, by layout and optimizer, counted on the CPU.

    python bench/memory.py
    python bench/memory.py --world 4 --json FILE

held        between two steps, gradients set to None: weights and optimizer state
backward    the most that is alive at once in forward and backward, activations included
step        the same in ``step()``

All three are bytes of the storages of tensors, of the rank that has most, over the number of parameters of the whole
model. The model is a GPT whose activations are small beside its weights.
"""

from __future__ import annotations

import argparse
import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common.ranks import over_ranks, run_ranks
from common.results import origin, write_json
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training.model import GPT, GPTConfig
from training.trainer import adamw, sharded

import dmuon

CONFIG = GPTConfig(layers=8, width=192, heads=4, context=16)
COLUMNS = ("held", "backward", "step")


class Live(TorchDispatchMode):
    """Follows the storages that are made inside; ``peak`` is the most bytes of them that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._counting = False  # before the first restart nobody asks
        self._storages: dict[int, weakref.ref[Any]] = {}

    def bytes(self) -> int:
        alive = {key: (ref, found) for key, ref in self._storages.items() if (found := ref()) is not None}
        self._storages = {key: ref for key, (ref, _) in alive.items()}
        return sum(found.nbytes() for _, found in alive.values())

    def restart(self) -> None:
        self._counting = True
        gc.collect()
        self.peak = self.bytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        if self._counting:
            self.peak = max(self.peak, self.bytes())
        return found

    def _follow(self, tensor: Tensor) -> None:
        for name in ("_local_tensor", "elem"):
            tensor = getattr(tensor, name, tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages or self._storages[key]() is None:
            self._storages[key] = weakref.ref(storage)  # its size may change under it


Laid = tuple[nn.Module, torch.optim.Optimizer]


def ddp(model: GPT, mesh: DeviceMesh, muon: bool) -> Laid:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, dmuon.Muon(wrapped) if muon else adamw(model.parameters(), 1e-3)


def fsdp(model: GPT, mesh: DeviceMesh, muon: bool, **options: Any) -> Laid:
    sharded(fully_shard, model, mesh=mesh, **options)
    return model, dmuon.Muon(model) if muon else adamw(model.parameters(), 1e-3)


def dedicated(model: GPT, mesh: DeviceMesh, **options: Any) -> Laid:
    dmuon.dedicate_params(model, mesh, costs="flops", **options)
    sharded(dmuon.fully_shard, model, mesh=mesh, **options)
    return model, dmuon.Muon(model)


def copies(model: GPT, mesh: DeviceMesh) -> Laid:
    grid = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("replicate",))
    dmuon.dedicate_params(model, grid, costs="flops")
    return model, dmuon.Muon(model)


LAYOUTS: dict[str, Callable[[GPT, DeviceMesh], Laid]] = {
    "DDP, AdamW": lambda model, mesh: ddp(model, mesh, muon=False),
    "DDP, one line": lambda model, mesh: ddp(model, mesh, muon=True),
    "full copies, two lines": copies,
    "FSDP2, AdamW": lambda model, mesh: fsdp(model, mesh, muon=False),
    "FSDP2, one line": lambda model, mesh: fsdp(model, mesh, muon=True),
    "FSDP2, two lines": dedicated,
    "FSDP2 kept, AdamW": lambda model, mesh: fsdp(model, mesh, muon=False, reshard_after_forward=False),
    "FSDP2 kept, one line": lambda model, mesh: fsdp(model, mesh, muon=True, reshard_after_forward=False),
    "FSDP2 kept, two lines": lambda model, mesh: dedicated(model, mesh, reshard_after_forward=False),
}


def measure(world: int, name: str) -> dict[str, float]:
    """The three numbers of one layout, each of the rank that has most."""
    torch.manual_seed(0)
    with Live() as live:
        model = GPT(CONFIG)
        elements = sum(p.numel() for p in model.parameters())
        laid, optimizer = LAYOUTS[name](model, init_device_mesh("cpu", (world,)))
        tokens = torch.randint(256, (1, CONFIG.context + 1))

        def backward() -> None:
            F.cross_entropy(laid(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()

        for _ in range(2):  # what is made once is made
            backward()
            optimizer.step()
            optimizer.zero_grad()
        live.restart()
        held = live.peak
        backward()
        in_backward = live.peak
        live.restart()
        optimizer.step()
        in_step = live.peak
    counts = over_ranks([count / elements for count in (held, in_backward, in_step)])
    return dict(zip(COLUMNS, counts, strict=True))


def table(rank: int, world: int, out: Path | None) -> None:
    """Prints a row of each layout, and writes all of them."""
    rows = {name: measure(world, name) for name in LAYOUTS}
    if rank == 0:
        print(f"{'bytes a parameter and rank':<28}" + "".join(f"{column:>10}" for column in COLUMNS))
        for name, row in rows.items():
            print(f"{name:<28}" + "".join(f"{row[column]:>10.1f}" for column in COLUMNS))
        if out is not None:
            write_json(out, {"origin": origin(), "world": world, "rows": rows})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(argv)
    run_ranks(args.world, table, args.world, args.json.resolve() if args.json else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
