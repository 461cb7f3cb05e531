"""accelerate on two ranks, under DDP and under FSDP2, against a loop on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.assertions import assert_equal_weights, assert_same_tensors
from harness.hugging_face import (
    MATRICES,
    OPTIONS,
    build,
    launched,
    samples,
    shared_folder,
    take_cpu_for_accelerator,
    weights_of,
)
from harness.on_ranks import assert_same_over_ranks, on_ranks, over_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dmuon

pytest.importorskip("accelerate", reason="accelerate is not installed (the extra 'frameworks')")
pytest.importorskip("transformers", reason="transformers is not installed (the extra 'frameworks')")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS, BATCH, MICRO, NORM = 4, 8, 2, 0.5
COPIES, SHARDED = "dedicated", "dedicated, the rest by FSDP2"
LAID_OUT = (COPIES, SHARDED)  # for an accelerator of ours


def reference(**options: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and norms of gradients after all steps, on whole batches."""
    model = build(**options)
    optimizer = dmuon.Muon(model, **OPTIONS)
    tokens = torch.stack([sample["input_ids"] for sample in samples()])
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = tokens[BATCH * step : BATCH * (step + 1)]
        model(input_ids=rows, labels=rows).loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)))
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}, norms


class Run:
    """A model under accelerate, which can be trained, saved and resumed."""

    def __init__(self, kind: str, **options: Any) -> None:
        import accelerate

        plugin = None
        if kind.endswith("STATE_DICT"):
            take_cpu_for_accelerator()
            plugin = accelerate.FullyShardedDataParallelPlugin(
                fsdp_version=2,
                state_dict_type=kind,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                cpu_ram_efficient_loading=False,
            )
        own = accelerate.Accelerator
        if kind in LAID_OUT:
            from dmuon.integrations.accelerate import DedicatedAccelerator

            own = DedicatedAccelerator
        self.accelerator = own(
            cpu=True, gradient_accumulation_steps=MICRO, fsdp_plugin=plugin, step_scheduler_with_optimizer=False
        )
        model = build(**options)
        world = self.accelerator.num_processes
        loader = torch.utils.data.DataLoader(samples(), batch_size=BATCH // MICRO // world)  # type: ignore[arg-type]
        if kind in LAID_OUT:
            mesh = init_device_mesh("cpu", (world,))
            dmuon.dedicate_params(model, mesh, costs="flops")
            for block in model.model.layers if kind == SHARDED else ():
                dmuon.fully_shard(block, mesh=mesh)
            if kind == SHARDED:
                dmuon.fully_shard(model, mesh=mesh)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, dmuon.Muon(model, **OPTIONS), loader)
        self.norms: list[float] = []

    def train(self, first: int, last: int) -> None:
        for number, rows in enumerate(self.loader):
            if not first * MICRO <= number < last * MICRO:
                continue
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**rows).loss)
                if self.accelerator.sync_gradients:
                    self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), NORM)))
                self.optimizer.step()
                self.optimizer.zero_grad()


@pytest.mark.pitfall("P74")
@pytest.mark.parametrize("kind", ["ddp", "SHARDED_STATE_DICT"])
@on_ranks(2, timeout=180.0)
def test_training_equals_one_process_and_resumes_exactly(rank: int, world: int, kind: str) -> None:
    expected, norms = reference()
    with shared_folder() as folder:
        with launched(rank, world):
            run = Run(kind)
            run.train(0, 2)
            run.accelerator.save_state(str(folder))
            run.train(2, STEPS)
            weights = weights_of(run.model)
            assert_equal_weights(weights, expected)
            assert_same_over_ranks(weights)
            assert all(isinstance(p, DTensor) == (kind != "ddp") for p in run.model.parameters())
            state = run.optimizer.optimizer.state
            assert {id(p) for p in state} == {id(p) for p in run.model.parameters()}, "of what accelerate replaced, too"
            assert run.norms == pytest.approx(norms, rel=1e-5)
            assert over_ranks(run.optimizer.optimizer.last_step.ns_matrices) == MATRICES["llama"]
        with launched(rank, world):
            resumed = Run(kind)
            resumed.accelerator.load_state(str(folder))
            resumed.train(2, STEPS)
            assert_same_tensors(weights_of(resumed.model), weights)


@pytest.mark.parametrize(("kind", "tied", "safe"), [(COPIES, True, True), (SHARDED, True, False)])
@on_ranks(2, timeout=180.0)
def test_dedicated_model_trains_and_its_files_are_those_of_one_process(
    rank: int, world: int, kind: str, tied: bool, safe: bool
) -> None:
    import safetensors.torch
    import transformers

    options = {"tie_word_embeddings": tied}
    expected, norms = reference(**options)
    with shared_folder() as folder:
        with launched(rank, world):
            run = Run(kind, **options)
            assert run.accelerator.unwrap_model(run.model) is run.model
            run.train(0, 2)
            halfway = weights_of(run.model)
            run.accelerator.save_state(str(folder / "state"), safe_serialization=safe)
            run.accelerator.save_model(run.model, str(folder / "model"), safe_serialization=safe)
            state = run.accelerator.get_state_dict(run.model)
            assert not state if rank else state.keys() == halfway.keys()
            run.model.save_pretrained(folder / "whole", state_dict=state)
            run.accelerator.wait_for_everyone()
            run.train(2, STEPS)
            weights = weights_of(run.model)
            assert_equal_weights(weights, expected)
            assert_same_over_ranks(weights)
            assert run.norms == pytest.approx(norms, rel=1e-5)
            assert over_ranks(run.optimizer.optimizer.last_step.ns_matrices) == MATRICES["llama"]
        with launched(rank, world):
            resumed = Run(kind, **options)
            resumed.accelerator.load_state(str(folder / "state"))
            resumed.train(2, STEPS)
            assert_same_tensors(weights_of(resumed.model), weights)
        name = "model.safetensors" if safe else "pytorch_model.bin"
        for file in (folder / "state" / name, folder / "model" / name):
            alone = build(**options)
            with torch.no_grad():
                for param in alone.parameters():
                    param.zero_()
            if safe:
                safetensors.torch.load_model(alone, file)
            else:
                alone.load_state_dict(torch.load(file))
            assert_same_tensors(dict(alone.state_dict()), halfway)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole")
        assert_same_tensors(dict(loaded.state_dict()), halfway)


@on_ranks(2, timeout=180.0)
def test_accelerators_that_do_not_fit_are_refused_with_the_one_that_does(rank: int, world: int) -> None:
    import accelerate

    from dmuon.integrations.accelerate import DedicatedAccelerator

    with launched(rank, world):
        model = build()
        dmuon.dedicate_params(model, init_device_mesh("cpu", (world,)), costs="flops")
        with pytest.raises(RuntimeError, match=r"dmuon\.integrations\.accelerate\.DedicatedAccelerator"):
            accelerate.Accelerator(cpu=True).prepare(model)
    with launched(rank, world):
        take_cpu_for_accelerator()
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        with pytest.raises(ValueError, match="accelerate is configured for FSDP, and dmuon lays out dedicated models"):
            DedicatedAccelerator(cpu=True, fsdp_plugin=plugin)
