"""The pretended device does what torch expects of an accelerator, with the CPU's bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pretend.listener import Listener, Range, Stream, listening

DEVICE = "pretend"
DEVICES = ("cpu", DEVICE)
Ranks = Callable[..., list[Any]]


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- operators and memory ---------------------------------------------------------------------------------------------

OPERATORS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a new tensor": lambda a, b: a @ b.mT + 2 * a.sum(),
    "in place": lambda a, b: a.mul_(b).add_(b, alpha=0.5),
    "in place on a view": lambda a, b: (a.mT[1:3].copy_(b.mT[:2]), a)[1],
    "into a tensor that is resized": lambda a, b: torch.mul(a, b, out=torch.empty(0, device=a.device)),
    "several results": lambda a, b: torch.topk(a, 2),
    "a list": lambda a, b: torch._foreach_add([a, b[0]], 3.0),
    "a list in place": lambda a, b: (torch._foreach_mul_([a, b], 3.0), a, b),
    "views": lambda a, b: (a.view(-1), a[::2, 1:], a.unfold(0, 2, 1), a.expand(2, *a.shape), a.diagonal()),
    "a mask": lambda a, b: a[a > 0],
    "indices": lambda a, b: a.index_add(0, torch.tensor([1, 0], device=a.device), b[:2]),
    "another dtype": lambda a, b: (a.to(torch.bfloat16) @ b.to(torch.bfloat16).mT, a.view(torch.int32)),
    "a number": lambda a, b: (a.norm().item(), a.tolist(), bool((a > b).any())),
    "concatenation": lambda a, b: (torch.cat([a, b]), torch.stack([a, b]), *torch.cat([a, b]).split(2)),
    "layer norm": lambda a, b: F.layer_norm(a, a.shape[-1:], b[0], b[1]),
    "an empty tensor": lambda a, b: (a[:0] * b[:0]).sum(),
    "factories": lambda a, b: (torch.arange(5, device=a.device), torch.eye(3, device=a.device), a.new_full((2,), 7.0)),
    "random numbers": lambda a, b: (torch.manual_seed(3), torch.randn(4, device=a.device))[1],
    "storage": lambda a, b: torch.empty(0, device=a.device).set_(a.untyped_storage(), 2, (2, 2), (3, 1)),
}


def flat(found: Any) -> list[Any]:
    if isinstance(found, (tuple, list)):
        return [leaf for each in found for leaf in flat(each)]
    return [found]


def compare_operators(_rank: int, _world: int) -> dict[str, str]:
    """What differs, by name."""
    wrong = {}
    for name, operator in OPERATORS.items():
        on = {device: flat(operator(values(4, 5).to(device), values(4, 5, seed=1).to(device))) for device in DEVICES}
        for expected, found in zip(on["cpu"], on[DEVICE], strict=True):
            if isinstance(expected, Tensor):
                if found.device.type != DEVICE or found.stride() != expected.stride():
                    wrong[name] = f"{found.device} {found.stride()}, not {expected.stride()}"
                if not torch.equal(found.cpu(), expected):
                    wrong[name] = f"{found.cpu()}, not {expected}"
            elif found != expected:
                wrong[name] = f"{found}, not {expected}"
    return wrong


def test_operators_have_the_bits_of_the_cpu(device_ranks: Ranks) -> None:
    assert device_ranks(1, compare_operators) == [{}]


def resize_storage(_rank: int, _world: int) -> None:
    buffer = torch.arange(6.0, device=DEVICE)
    part = buffer[2:]
    buffer.untyped_storage().resize_(0)
    assert buffer.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="memory of 0 bytes is too small or freed"):
        part + 1
    buffer.untyped_storage().resize_(24)
    assert part.isnan().all(), "what nobody has written is NaN"
    buffer.fill_(1.0)
    assert part.cpu().tolist() == [1.0] * 4
    buffer.untyped_storage().resize_(12)
    buffer.untyped_storage().resize_(24)
    assert buffer.cpu()[:3].tolist() == [1.0] * 3 and buffer.cpu()[3:].isnan().all(), "what both sizes have is kept"


def test_storage_is_freed_and_comes_back(device_ranks: Ranks) -> None:
    device_ranks(1, resize_storage)


# -- streams ----------------------------------------------------------------------------------------------------------


def use_streams(_rank: int, _world: int) -> None:
    module = torch.pretend  # type: ignore[attr-defined]
    main, side = module.current_stream(), module.Stream(torch.device(DEVICE), priority=-1)
    assert main == module.default_stream() and side != main
    with module.stream(side):
        assert module.current_stream() == side
        with module.stream(module.Stream(f"{DEVICE}:2")):
            assert module.current_device() == 2 and module.current_stream(0) == side
        assert module.current_device() == 0 and module.current_stream() == side
        elsewhere: list[torch.Stream] = []
        thread = threading.Thread(target=lambda: elsewhere.append(module.current_stream()))
        thread.start()
        thread.join()
        assert elsewhere == [main], "every thread has streams of its own"
        assert module.current_stream(torch.device(DEVICE, 1)) == module.default_stream(1)
    assert module.current_stream() == main
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    begin.record()
    end.record(side)
    side.wait_event(begin)
    side.synchronize()
    end.synchronize()
    module.synchronize()
    assert end.query() and begin.elapsed_time(end) >= 0.0


def test_streams_are_of_a_thread_and_a_device(device_ranks: Ranks) -> None:
    device_ranks(1, use_streams)


def hooks(_rank: int, _world: int) -> None:
    module = torch.pretend  # type: ignore[attr-defined]
    forward, backward = module.Stream(), module.Stream()
    found: dict[str, tuple[int, torch.Stream]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda *_: found.update({name: (threading.get_ident(), module.current_stream())})

    layer = nn.Linear(3, 3).to(DEVICE)
    layer.weight.register_post_accumulate_grad_hook(note("accumulated"))
    layer.register_full_backward_hook(note("module"))
    with module.stream(forward):
        loss = layer(torch.ones(2, 3, device=DEVICE, requires_grad=True)).sum()
    with module.stream(backward):
        loss.register_hook(note("loss"))
        loss.backward()
    for name in ("loss", "module", "accumulated"):
        thread, stream = found[name]
        assert thread != threading.get_ident(), f"{name} ran in the thread that called backward"
        assert stream == forward, f"{name} ran under {stream}"


def test_hooks_run_in_the_thread_of_autograd_under_the_stream_of_the_forward(device_ranks: Ranks) -> None:
    device_ranks(1, hooks)


# -- what a listener is told ------------------------------------------------------------------------------------------


class Journal(Listener):
    """Everything, in order; streams by the names that a program has given them."""

    def __init__(self) -> None:
        self.names: dict[Stream, str] = {Stream(0, 0): "main"}
        self.events: dict[int, str] = {}
        self.entries: list[str] = []
        self.ranges: list[tuple[str, list[Range], list[Range]]] = []

    def name(self, stream: torch.Stream, name: str) -> None:
        self.names[Stream(stream.device_index, stream.stream_id)] = name

    def _of(self, stream: Stream) -> str:
        return self.names.setdefault(stream, f"stream {len(self.names)}")

    def stream_created(self, stream: Stream, priority: int) -> None:
        self.entries.append(f"{self._of(stream)} created with priority {priority}")

    def record_event(self, event: int, stream: Stream) -> None:
        self.events[event] = self._of(stream)

    def wait_event(self, event: int, stream: Stream) -> None:
        self.entries.append(f"{self._of(stream)} waits for {self.events[event]}")

    def synchronize(self, *, event: int | None = None, stream: Stream | None = None) -> None:
        what = self.events[event] if event is not None else "the device" if stream is None else self._of(stream)
        self.entries.append(f"host waits for {what}")

    def allocated(self, address: int, nbytes: int, stream: Stream) -> None:
        self.entries.append(f"{nbytes} bytes of {self._of(stream)}")

    def freed(self, address: int, nbytes: int, stream: Stream) -> None:
        self.entries.append(f"{nbytes} bytes of {self._of(stream)} freed")

    def record_stream(self, address: int, nbytes: int, stream: Stream) -> None:
        self.entries.append(f"{nbytes} bytes recorded on {self._of(stream)}")

    def launched(self, op: str, stream: Stream, reads: list[Range], writes: list[Range]) -> None:
        self.entries.append(f"{op.split('::')[1]} on {self._of(stream)}")
        self.ranges.append((op, reads, writes))

    def taken(self) -> list[str]:
        entries, self.entries = self.entries, []
        return entries

    def expect(self, *entries: str) -> None:
        found = self.taken()
        assert found == [*entries], found


def listen(_rank: int, _world: int) -> None:
    module = torch.pretend  # type: ignore[attr-defined]
    journal = Journal()
    with listening(journal):
        x = torch.empty(4, 4, device=DEVICE).fill_(0)
        journal.expect("64 bytes of main", "fill_ on main")
        side = module.Stream(priority=-1)
        journal.expect("stream 1 created with priority -1")
        side.wait_stream(module.current_stream())
        with module.stream(side):
            x[1:3].add_(1)
        x.record_stream(side)
        journal.expect("stream 1 waits for main", "add on stream 1", "64 bytes recorded on stream 1")
        _, reads, writes = journal.ranges[-1]
        assert reads == writes == [(x.data_ptr() + 16, 32)]
        event = module.Event()
        event.record(side)
        event.synchronize()
        module.current_stream().wait_event(event)
        journal.expect("host waits for stream 1", "main waits for stream 1")
        x.untyped_storage().resize_(0)
        journal.expect("64 bytes of main freed")
    x.untyped_storage().resize_(64)
    journal.expect()


def host_waits(_rank: int, _world: int) -> None:
    journal = Journal()
    pageable, pinned = torch.zeros(4), torch.zeros(4).pin_memory()
    assert pinned.is_pinned() and not pageable.is_pinned()
    x = torch.ones(4, device=DEVICE)
    waits = {
        "to a number": lambda: x[0].item(),
        "to pageable memory": lambda: pageable.copy_(x, non_blocking=True),
        "to pinned memory": lambda: pinned.copy_(x),
        "from pageable memory": lambda: x.copy_(pageable, non_blocking=True),
    }
    free = {
        "to pinned memory": lambda: pinned.copy_(x, non_blocking=True),
        "from pinned memory": lambda: x.copy_(pinned, non_blocking=True),
        "on the device": lambda: x.copy_(x.clone()),
    }
    with listening(journal):
        for name, action in waits.items():
            action()
            assert "host waits for main" in journal.taken(), name
        for name, action in free.items():
            action()
            assert "host waits for main" not in journal.taken(), name


def collectives_on_streams(_rank: int, world: int) -> None:
    journal = Journal()
    x, gathered = torch.ones(2, device=DEVICE), torch.zeros(2 * world, device=DEVICE)
    journal.names = {Stream(x.device.index, 0): "main"}
    dist.all_reduce(x, async_op=True).wait()  # the communicator's stream is there
    with listening(journal):
        work = dist.all_gather_into_tensor(gathered, x, async_op=True)
        journal.expect("stream 1 waits for main", "_allgather_base_ on stream 1")
        _, reads, writes = journal.ranges[-1]
        assert reads == [(x.data_ptr(), 8)] and writes == [(gathered.data_ptr(), 8 * world)]
        work.wait()
        journal.expect("main waits for stream 1")
        dist.broadcast(x, 0)
        journal.expect("broadcast_ on main", "main waits for main")  # what blocks runs on the current stream


def test_a_listener_hears_of_streams_memory_and_operators(device_ranks: Ranks) -> None:
    device_ranks(1, listen)


def test_the_host_waits_as_for_cuda(device_ranks: Ranks) -> None:
    device_ranks(1, host_waits)


def test_collectives_run_on_streams_of_their_communicator(device_ranks: Ranks) -> None:
    device_ranks(2, collectives_on_streams)


def faulty(_rank: int, _world: int) -> None:
    class Faulty(Listener):
        def allocated(self, address: int, nbytes: int, stream: Stream) -> None:
            raise ValueError("heard")

    with pytest.raises(ValueError, match="heard"), listening(Faulty()):
        torch.zeros(1, device=DEVICE)


def test_what_a_listener_raises_is_raised(device_ranks: Ranks) -> None:
    device_ranks(1, faulty)


# -- several ranks ----------------------------------------------------------------------------------------------------


def run_collectives(rank: int, world: int, device: str) -> dict[str, list[Tensor]]:
    """What every collective leaves, started at once and awaited in the end where that is possible."""

    def mine(*shape: int, seed: int = 0) -> Tensor:
        return values(*shape, seed=10 * rank + seed).to(device)

    def empty(*shape: int) -> Tensor:
        return torch.zeros(*shape, device=device)

    uneven = [3, 1] if rank == 0 else [2, 4]
    returned = [3, 2] if rank == 0 else [1, 4]
    results: dict[str, list[Tensor]] = {}
    works: list[dist.Work | None] = []

    def start(name: str, outputs: list[Tensor], work: dist.Work | None) -> None:
        results[name] = outputs
        works.append(work)

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        x = mine(5)
        start(f"all_reduce {op}", [x], dist.all_reduce(x, op, async_op=True))
    x = mine(5)
    start("broadcast", [x], dist.broadcast(x, 1, async_op=True))
    x = mine(5)
    start("reduce", [x] if rank == 0 else [], dist.reduce(x, 0, async_op=True))
    x = empty(5 * world)
    start("all_gather_into_tensor", [x], dist.all_gather_into_tensor(x, mine(5), async_op=True))
    parts = [empty(5) for _ in range(world)]
    start("all_gather", parts, dist.all_gather(parts, mine(5), async_op=True))
    x = empty(5)
    average = dist.ReduceOp.AVG
    start("reduce_scatter_tensor", [x], dist.reduce_scatter_tensor(x, mine(5 * world), average, async_op=True))
    x = empty(sum(returned))
    work = dist.all_to_all_single(x, mine(sum(uneven)), returned, uneven, async_op=True)
    start("all_to_all_single", [x], work)
    x = empty(5)
    start("scatter", [x], dist.scatter(x, [mine(5), mine(5, seed=1)] if rank == 0 else None, async_op=True))
    x = mine(5)
    start("send and recv", [x], dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0))
    start("barrier", [], dist.barrier(async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    x = mine(5)
    results["future"] = dist.all_reduce(x, async_op=True).get_future().wait()
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, rank)
    assert everyone == list(range(world))
    return {name: [tensor.cpu() for tensor in outputs] for name, outputs in results.items()}


def compare_collectives(rank: int, world: int) -> None:
    expected, found = (run_collectives(rank, world, device) for device in DEVICES)
    for name, outputs in expected.items():
        for a, b in zip(outputs, found[name], strict=True):
            assert torch.equal(a, b), f"{name}: {b}, not {a}"


def test_collectives_are_those_of_gloo(device_ranks: Ranks) -> None:
    device_ranks(2, compare_collectives)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def wrap_ddp(module: nn.Module, device: str) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def wrap_fsdp(module: nn.Module, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in module.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def compare_gradients(rank: int, _world: int, wrap: Callable[[nn.Module, str], nn.Module]) -> None:
    found: dict[str, list[Tensor]] = {}
    for device in DEVICES:
        wrapped = wrap(model().to(device), device)
        for step in range(2):  # DDP makes its buckets anew after the first
            wrapped.zero_grad()
            wrapped(values(4, 5, seed=10 * rank + step).to(device)).square().mean().backward()
        grads = [p.grad for p in wrapped.parameters()]
        assert all(grad is not None and grad.device.type == device for grad in grads)
        found[device] = [(g.full_tensor() if isinstance(g, DTensor) else g).cpu() for g in grads if g is not None]
    for expected, grad in zip(found["cpu"], found[DEVICE], strict=True):
        assert torch.equal(expected, grad)


@pytest.mark.parametrize("wrap", [wrap_ddp, wrap_fsdp])
def test_data_parallel_gradients_have_the_bits_of_the_cpu(
    device_ranks: Ranks, wrap: Callable[[nn.Module, str], nn.Module]
) -> None:
    device_ranks(2, compare_gradients, wrap)


def redistribute(_rank: int, world: int) -> None:
    mesh = init_device_mesh(DEVICE, (world,))
    whole = values(5, 3)
    rows = distribute_tensor(whole.to(DEVICE), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    for tensor in (rows, columns, columns.redistribute(mesh, [Replicate()])):
        assert torch.equal(tensor.full_tensor().cpu(), whole), tensor.placements


def test_dtensors_are_redistributed(device_ranks: Ranks) -> None:
    device_ranks(2, redistribute)
