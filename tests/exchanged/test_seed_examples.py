"""Every printed example of the design documents that concerns ``DistributedConfig``, under the name of its document.

They run as printed, module names aside: ``torch.optim`` is dmuon, ``"cuda"`` is the CPU, and what ``...`` stands for is
given. Where a document contradicts itself the test says so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness.assertions import assert_equal_weights
from harness.network import tensor_parallel
from harness.on_ranks import on_ranks
from harness.toy import build, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon

OPTIONS = "lr=0.02, momentum=0.95, nesterov=True, ns_steps=5"  # of all examples of the first document
NAMES: dict[str, Any] = {name: getattr(dmuon, name) for name in dmuon.__all__ if name.startswith(("Muon", "create_"))}


class MyModel(nn.Module):
    """Returns its loss, as the validation program takes it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, data: Tensor) -> Tensor:
        for layer in self.layers:
            data = torch.tanh(layer(data))
        return data.square().mean()


DATA = [torch.randn(8, 6, generator=torch.Generator().manual_seed(step)) for step in range(4)]


def run(program: str, **names: Any) -> dict[str, Any]:
    """``program``, and what it has made."""
    found = {**NAMES, "MyModel": MyModel, "FSDP": FSDP, "torch": torch, "init_device_mesh": init_device_mesh, **names}
    exec(compile(program, "printed", "exec"), found)
    return found


def whole(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model, writeback=False):
            return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in model.named_parameters()}
    named = {name: param.detach() for name, param in model.named_parameters()}
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in named.items()}


def alone(model: nn.Module, steps: int = 2) -> dict[str, Tensor]:
    """One process with the same options."""
    optimizer = dmuon.Muon(model.parameters(), **eval(f"dict({OPTIONS})"))
    train(model, optimizer, range(steps))
    return whole(model)


DOTS = "use_orig_params=True, device_id=torch.device('cpu')"  # what ``FSDP(model, ...)`` leaves out


@on_ranks(3)
def test_muon_distributed_config_design_example_1_fsdp(rank: int, world: int) -> None:
    made = run(
        f"""
# Setup FSDP model
model = MyModel()
model = FSDP(model, {DOTS})

# Create Muon optimizer with distributed support
optimizer = Muon(
    model.parameters(),
    {OPTIONS},
    distributed_config=create_processgroup_config(
        fsdp_pg=model.process_group,
    )
)
""",
        MyModel=build,
    )
    train(made["model"], made["optimizer"], range(2), rank, world)
    assert_equal_weights(whole(made["model"]), alone(build()))


@on_ranks(3)
def test_muon_distributed_config_design_validation_program(rank: int, world: int) -> None:
    """Ranks gather outside of the last ``if``, as that is collective: by the comments in it they would wait for ever.

    As printed nothing zeroes gradients, and every rank sees all of the data.
    """
    made = run(
        f"""
# 1. Single-GPU reference
model_ref = MyModel()
optimizer_ref = Muon(model_ref.parameters(), lr=0.02)
for data in dataloader:
    loss = model_ref(data)
    loss.backward()
    optimizer_ref.step()

# 2. Multi-GPU distributed
model_dist = MyModel()  # Same initialization as model_ref
model_dist = FSDP(model_dist, {DOTS})
optimizer_dist = Muon(
    model_dist.parameters(),
    lr=0.02,
    distributed_config=create_processgroup_config(fsdp_pg=model_dist.process_group)
)
for data in dataloader:
    loss = model_dist(data)
    loss.backward()
    optimizer_dist.step()
""",
        dataloader=DATA,
    )
    gathered = whole(made["model_dist"])
    if torch.distributed.get_rank() == 0:
        for name, expected in made["model_ref"].named_parameters():
            torch.testing.assert_close(gathered[name], expected.detach(), rtol=1e-5, atol=1e-5)


@on_ranks(4)
def test_muon_distributed_config_design_example_2_fsdp_and_tp(rank: int, world: int) -> None:
    def lay(model: Any, mesh: Any) -> None:
        tensor_parallel(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])

    made = run(
        f"""
# Setup device mesh for combined parallelism
device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp", "tp"])
# Apply FSDP + TP to model...
model = MyModel()
lay(model, device_mesh)

optimizer = Muon(
    model.parameters(),
    {OPTIONS},
    distributed_config=create_devicemesh_config(
        device_mesh=device_mesh,
        mesh_dim_names=["dp", "tp"]
    )
)
""",
        MyModel=build,
        lay=lay,
    )
    train(made["model"], made["optimizer"], range(2), rank // 2, 2)
    assert_equal_weights(whole(made["model"]), alone(build()))


@on_ranks(2)
def test_muon_distributed_config_design_examples_3_and_4(rank: int, world: int) -> None:
    for config in ("distributed_config=create_dtensor_config()", ""):
        model = build()
        if config:
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        made = run(f"optimizer = Muon(model.parameters(), {OPTIONS}, {config})", model=model)
        train(model, made["optimizer"], range(2), *((rank, world) if config else (0, 1)))
        assert_equal_weights(whole(model), alone(build()))


ARCHITECTURE_CP = """
def cp_gather_fn(update, rank, state):
    # Updates already replicated (computed from all-reduced gradients), no gathering needed
    # Just return the local copy
    return update.clone()

def cp_redistribute_fn(ortho_update, rank, state):
    cp_pg = state["cp_process_group"]
    assignments = state["assignments"]  # Which params this rank orthogonalized
    param_idx = state["current_param_idx"]

    # Find which rank owns this parameter's orthogonalization
    owner_rank = None
    for r, param_indices in assignments.items():
        if param_idx in param_indices:
            owner_rank = r
            break
{mended}
    # Broadcast from owner to all ranks in CP group
    # (Each GPU only broadcasts updates it orthogonalized)
    dist.broadcast(ortho_update, src=owner_rank, group=cp_pg)

    # Now all ranks have the orthogonalized update
    return ortho_update

config = DistributedConfig(assign_fn, cp_gather_fn, cp_redistribute_fn, dict(cp_process_group=dist.group.WORLD), prefetch_count=0)
optimizer = Muon(model, lr=0.02, distributed_config=config)
"""  # noqa: E501


@pytest.mark.parametrize("mended", [False, True])
@on_ranks(2)
def test_muon_distributed_architecture_context_parallel_functions(rank: int, world: int, mended: bool) -> None:
    """As printed they broadcast None: the first document gives ``redistribute_fn`` no update but on the owner.

    With the one line that the contradiction leaves out they train.
    """
    line = "    if ortho_update is None: ortho_update = torch.empty(6, 6)\n" if mended else ""
    model = MyModel()
    names = {"model": model, "dist": dist, "DistributedConfig": dmuon.DistributedConfig}
    made = run(
        ARCHITECTURE_CP.format(mended=line),
        assign_fn=lambda params, state: {r: list(range(r, len(params), world)) for r in range(world)},
        **names,
    )
    if not mended:
        state = {"cp_process_group": dist.group.WORLD, "assignments": {0: [0]}, "current_param_idx": 0}
        with pytest.raises(TypeError, match="NoneType"):  # on every rank that is not the owner
            made["cp_redistribute_fn"](None, 0, state)
        return
    model(DATA[0]).backward()
    made["optimizer"].step()
    expected = MyModel()
    expected(DATA[0]).backward()
    dmuon.Muon(expected, lr=0.02).step()
    assert_equal_weights(whole(model), whole(expected))


@on_ranks(2)
def test_muon_distributed_architecture_auto_config(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    model = build()
    tensor_parallel(model, mesh["tp"])
    made = run(
        """
# Instead of writing custom functions for FSDP+TP...
config = create_auto_config(
    tp_process_group=tp_pg,
    fsdp_process_group=fsdp_pg,
    tp_shard_dim=1
)
# ...create_auto_config() generates the three functions automatically
""",
        tp_pg=mesh["tp"].get_group(),
        fsdp_pg=mesh["fsdp"].get_group(),
    )
    select: Any = lambda name, _module, param: isinstance(param, DTensor) and param.ndim == 2  # noqa: E731
    train(model, dmuon.Muon(model, select=select, distributed_config=made["config"]), range(2))
    expected = build()
    train(expected, dmuon.Muon(expected), range(2))
    assert_equal_weights(whole(model), whole(expected))


@pytest.mark.parametrize(("keyword", "instead"), [("warmup_step", "prefetch_count"), ("chunk_size", "chunk_bytes")])
def test_pipelined_all_to_all_muon_keywords(keyword: str, instead: str) -> None:
    """``max_concurrent = warmup_step + 1`` rounds are under way, and a chunk is a number of parameters there."""
    for name in (
        "create_dtensor_config",
        "create_processgroup_config",
        "create_devicemesh_config",
        "create_auto_config",
    ):
        with pytest.raises(TypeError, match=rf"dmuon\.{name}\(\).* {keyword!r}; write {instead}="):
            getattr(dmuon, name)(**{keyword: 5})
    with pytest.raises(TypeError, match=rf"{keyword!r}; write distributed_config=.*{instead}="):
        dmuon.Muon(MyModel(), **{keyword: 5})
