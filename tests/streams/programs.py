"""Programs as data: how a model lies, with what options, and what is done with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from harness.inside import buckets_of
from harness.network import Block, Network, Size, loss_of
from harness.topologies import LAYOUTS, Laid, lay
from harness.toy import SIZE, VOCAB, batch, build
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon import kernels
from streams.clock import Race, Site
from streams.collectives import Collectives, Launched
from streams.observer import Module, Observer, Stream
from streams.plants import Plant, planted
from streams.recordings import recorded_in_buffers


@dataclass(frozen=True)
class Program:
    """What every rank does.

    Attributes:
        layout: of ``harness.topologies``; None: a copy on each of two ranks, exchanged by a user's functions.
        actions: names of :data:`ACTIONS`, in order; with ``@side`` on another stream, before and after which the
            program waits as it should.
        ns_dtype: of Newton–Schulz; in half precision pieces travel normalized.
        strategy: who orthogonalizes what is exchanged.
        second_moment: as ``dmuon.Muon`` has it.
        nccl: transports are chosen as on NCCL.
        graphs: how many recordings are kept, of which all updates are replayed; 0: nothing is recorded.
        bucket: bytes of replicated gradients that travel together; None is dmuon's own choice.
        optimizers: models, each with an optimizer; what is done is done with one after the other.
        comm: options of :class:`dmuon.CommOptions`.
    """

    layout: str | None
    actions: str
    keep: bool = False
    overlap: bool = False
    half: bool = False
    ns_dtype: torch.dtype | None = None
    strategy: str = "owner"
    second_moment: str | None = None
    nccl: bool = False
    graphs: int = 0
    model: Literal["toy", "single", "auxiliary", "branches", "towers"] = "toy"
    optimizers: int = 1
    bucket: int | None = None
    comm: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return 2 if self.layout is None else LAYOUTS[self.layout].world

    @property
    def dedicated(self) -> bool:
        return self.layout is not None and LAYOUTS[self.layout].dedicated


class Single(nn.Module):
    """A block of one matrix."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.mix = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


class Auxiliary(Network):
    """With parameters that the first rank alone uses; their gradients are the first to come."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.last = nn.LayerNorm(VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return self.last(logits) if dist.get_rank() == 0 else logits


class Branches(Block):
    """Its first layer runs on a stream of its own. No gradient of its input would make others wait for that.

    On an accelerator autograd runs each node, and the hooks of the parameters behind it, on the stream of its forward.
    Here all nodes run in one thread, in the reverse order of forward, and hooks of tensors change the stream there.
    """

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.module: Any = kernels.streams_of(torch.device("cpu"))
        self.side = self.module.Stream()

    def forward(self, x: Tensor) -> Tensor:
        main = self.module.current
        self.side.wait_stream(main)
        with self.module.stream(self.side):
            x.record_stream(self.side)
            start = x.detach().clone().requires_grad_()
            start.register_hook(lambda _: _go_on(self.module, main))
            wide = self.up(self.norm(start))
            wide.register_hook(lambda grad: _go_on(self.module, self.side, grad, self.module.current.record_event()))
        main.wait_stream(self.side)
        return x + self.mix(x) + self.down(torch.tanh(wide))


class Towers(Network):
    """Its blocks run beside each other."""

    def __init__(self) -> None:
        super().__init__(SIZE, Branches)
        self.module: Any = kernels.streams_of(torch.device("cpu"))
        self.towers = [self.module.Stream() for _ in self.blocks]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        outputs = []
        for block, tower in zip(self.blocks, self.towers, strict=True):
            outputs.append(self.run_beside(block, tower, x))
        together = torch.stack(outputs)
        together.register_hook(self.mark)
        logits: Tensor = self.head(self.norm(together.sum(0)))
        return logits

    def mark(self, _: Tensor) -> None:
        self.event = self.module.current.record_event()

    def run_beside(self, block: nn.Module, tower: Stream, x: Tensor) -> Tensor:
        main = self.module.current
        tower.wait_stream(main)
        x.record_stream(tower)
        own = x.view_as(x)
        own.register_hook(lambda grad: _go_on(self.module, main, grad, tower.record_event()))
        with self.module.stream(tower):
            output: Tensor = block(own)
        output.register_hook(lambda grad: _go_on(self.module, tower, grad, self.event))
        main.wait_stream(tower)
        output.record_stream(main)
        return output


def _go_on(module: Any, stream: Stream, grad: Tensor | None = None, made: Any = None) -> None:
    """Let ``stream`` be the current one, behind what has made a gradient that it reads."""
    if grad is not None:
        stream.wait_event(made)
        grad.record_stream(stream)
    module.current = stream


def _wait_in_the_end(streams: list[Stream]) -> Callable[[Tensor], None]:
    """As autograd lets the stream that called backward wait for those on which gradients were accumulated."""

    def begin(_: Tensor) -> None:
        current = streams[0].module.current
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(lambda: [current.wait_stream(stream) for stream in streams])

    return begin


LAYERS = 2
MODELS: dict[str, Callable[[], Network]] = {
    "toy": lambda: build(layers=LAYERS),
    "single": lambda: build(layers=LAYERS, block=Single),
    "auxiliary": Auxiliary,
    "branches": lambda: build(layers=LAYERS, block=Branches),
    "towers": Towers,
}


@dataclass
class Findings:
    """What one rank was seen to do.

    Attributes:
        waits: of the host for the device, by where, for each action.
        before_training: how many collectives of the journal belong to setting up.
    """

    races: Counter[Race]
    waits: list[tuple[str, Counter[Site]]]
    journal: list[Launched]
    before_training: int


@dataclass
class Trained:
    """A model in training.

    Attributes:
        steps: how many batches it has seen.
    """

    laid: Laid
    optimizer: dmuon.Muon
    half: bool
    saved: dict[str, Any] = field(default_factory=dict)
    steps: int = 0

    @property
    def model(self) -> nn.Module:
        return self.laid.model

    def loss(self) -> Tensor:
        step, self.steps = self.steps, self.steps + 1
        return loss_of(self.model, *self.laid.mine(batch(step)), torch.bfloat16 if self.half else torch.float32)


def _backward(trained: Trained) -> None:
    sides = [block.side for block in trained.laid.network.blocks if isinstance(block, Branches)]
    loss = trained.loss()
    if sides:
        loss.register_hook(_wait_in_the_end(sides))
    loss.backward()
    trained.laid.reduce()
    for side in sides:
        with side.module.stream(side):
            torch.zeros(4)  # takes what was freed on this stream, and has nothing to wait for


def _accumulate(trained: Trained) -> None:
    with dmuon.no_sync(trained.model):
        trained.loss().backward()


def _evaluate(trained: Trained) -> None:
    with torch.no_grad():
        trained.loss()


def _summon(trained: Trained) -> None:
    with dmuon.summon_full_params(trained.model):
        for param in trained.model.parameters():
            if hasattr(param, "_dmuon_rest"):
                param.data.mul_(0.99)


def _save(trained: Trained) -> None:
    trained.saved = {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}


def _load(trained: Trained) -> None:
    trained.model.load_state_dict(trained.saved["model"])
    trained.optimizer.load_state_dict(trained.saved["optimizer"])


ACTIONS: dict[str, Callable[[Trained], Any]] = {
    "backward": _backward,
    "accumulate": _accumulate,
    "step": lambda trained: trained.optimizer.step(),
    "zero": lambda trained: trained.optimizer.zero_grad(),
    "zero-model": lambda trained: trained.model.zero_grad(),
    "clip": lambda trained: dmuon.clip_grad_norm_(trained.model.parameters(), 1e-3),
    "evaluate": _evaluate,
    "summon": _summon,
    "save": _save,
    "load": _load,
}


# A user's functions, for copies on all ranks whose gradients nobody has averaged.


def _assign(params: list[Tensor], _state: dict[str, Any]) -> dict[int, int]:
    return {i: i % dist.get_world_size() for i in range(len(params))}


def _gather(update: Tensor, _dst_rank: int, state: dict[str, Any]) -> tuple[Tensor, Any]:
    state.setdefault("shapes", {})[state["current_param_idx"]] = update.shape
    whole = update.clone()
    return whole, dist.all_reduce(whole, dist.ReduceOp.AVG, async_op=True)


def _redistribute(update: Tensor | None, src_rank: int, state: dict[str, Any]) -> tuple[Tensor, Any]:
    part = torch.empty(state["shapes"][state["current_param_idx"]]) if update is None else update
    return part, dist.broadcast(part, src=src_rank, async_op=True)


def run(_rank: int, _world: int, program: Program, plant: Plant | None = None) -> Findings:
    """Run ``program`` under observation."""
    observer = Observer()
    collectives = Collectives(observer, nccl=program.nccl)
    waits: list[tuple[str, Counter[Site]]] = []
    with ExitStack() as stack:
        stack.enter_context(planted(plant) if plant is not None else nullcontext())
        if program.graphs:
            stack.enter_context(recorded_in_buffers(program.graphs))
        if program.bucket is not None:
            stack.enter_context(buckets_of(program.bucket))
        stack.enter_context(collectives.entered())
        stack.enter_context(observer)
        all_trained = [_made(program) for _ in range(program.optimizers)]
        observer.module.waits.clear()
        before_training = len(collectives.journal)
        side = observer.module.Stream()
        for action in program.actions.split():
            name, _, where = action.partition("@")
            for trained in all_trained:
                with _on(observer.module, side) if where else nullcontext():
                    ACTIONS[name](trained)
            waits.append((action, Counter(observer.module.waits)))
            observer.module.waits.clear()
    return Findings(observer.memory.races, waits, collectives.journal, before_training)


def _made(program: Program) -> Trained:
    torch.manual_seed(0)
    model = MODELS[program.model]()
    if program.layout is None:
        config = dmuon.DistributedConfig(_assign, _gather, _redistribute, {})
        laid = Laid(model, None, dist.get_rank(), program.world, model, config)  # type: ignore[arg-type]
        return Trained(laid, laid.optimizer(), False)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if program.half else None
    options: dict[str, Any] = {"comm": dmuon.CommOptions(**program.comm)} if program.dedicated else {}
    laid = lay(program.layout, model, keep=program.keep, mp_policy=half, **options)
    options = {"overlap_backward": program.overlap, "ns_dtype": program.ns_dtype, "strategy": program.strategy}
    options["second_moment"] = program.second_moment
    return Trained(laid, laid.optimizer(**options), program.half)


@contextmanager
def _on(module: Module, stream: Stream) -> Iterator[None]:
    current = module.current_stream()
    stream.wait_stream(current)
    with module.stream(stream):
        yield
    torch.empty(1)  # of something else, before it has to wait
    current.wait_stream(stream)


T = "backward step zero"  # one step of training
PROGRAMS: dict[str, Program] = {
    "lines": Program("1d-two-lines", f"{T} {T} step evaluate backward step step", bucket=1000),
    "overlap": Program("1d-two-lines", f"{T} {T} backward zero-model {T} backward zero {T}", overlap=True, bucket=1000),
    "uneven": Program("1d-two-lines", f"{T} {T}", nccl=True),
    "single": Program("hsdp-two-lines", f"{T} {T} backward step step {T}", model="single"),
    "fsdp exchanged": Program("fsdp2-2", f"{T} {T}"),
    "fsdp exchanged half": Program("fsdp2-2", f"{T} {T}", ns_dtype=torch.float16),
    "fsdp rows": Program("fsdp2-2", f"{T} {T}", second_moment="row"),
    "fsdp full_replication": Program("fsdp2-2", f"{T} {T}", ns_dtype=torch.float16, strategy="full_replication"),
    "fsdp fused": Program("fsdp2-2", f"{T} {T}", strategy="fused"),
    "fsdp sharded": Program("fsdp2-2", f"{T} {T}", strategy="sharded"),
    "far ahead": Program("1d-two-lines", f"{T} accumulate {T}", half=True, comm={"prefetch": 2}),
    "merged": Program("hsdp-two-lines", f"{T} summon {T} backward clip step summon {T}", comm={"merge_bytes": 10**6}),
    "hsdp overlap": Program("hsdp-two-lines", f"{T} {T}", overlap=True),
    "ddp": Program("ddp-2", f"{T} {T} step {T}", keep=True),
    "tensor fsdp": Program("tp-fsdp", f"{T} {T}"),
    "clipped overlap": Program("1d-two-lines", f"{T} backward clip step zero {T}", overlap=True),
    "loaded early": Program("1d-two-lines", f"{T} save backward load step zero {T}", overlap=True),
    "dropped": Program("1d-two-lines", f"{T} save backward zero load {T}", overlap=True),
    "evaluated beside": Program("1d-two-lines", f"{T} {T} evaluate@side backward step@side zero {T}"),
    "single beside": Program("hsdp-two-lines", f"{T} {T} evaluate@side {T}", model="single"),
    "auxiliary": Program("1d-two-lines", f"{T} {T} {T} {T}", model="auxiliary", bucket=1000),
    "branches": Program("1d-two-lines", f"{T} {T}", model="branches"),
    "towers": Program("1d-two-lines", f"{T} {T}", keep=True, model="towers", comm={"merge_bytes": 10**6}),
    "two optimizers": Program("1d-two-lines", f"{T} {T}", overlap=True, graphs=32, optimizers=2),
    "dropped graphs": Program("1d-two-lines", f"backward clip step zero {T}", overlap=True, graphs=1),
    "hsdp exchanged": Program("fsdp2-hsdp", f"{T} {T}", nccl=True),
    "ddp exchanged": Program("ddp", f"{T} {T}"),
    "functions": Program(None, f"{T} {T}"),
}
