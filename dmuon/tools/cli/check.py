"""``dmuon-check``: verify dmuon on these machines and this back end, one line per check; exit status 0 if none failed.

    torchrun --nproc-per-node 8 --no-python dmuon-check

Trains a small model on every topology that the ranks can form, compares it with one process, and counts collectives.

    dmuon-check --first-run

on a machine with new GPUs: the same after kernels against fp64 and the replay of a CUDA graph, on ranks that it starts
itself, one a GPU. All of it goes into one file. ``--device cpu`` runs it without a GPU, on small sizes.
"""

from __future__ import annotations

import argparse
import base64
import faulthandler
import gc
import json
import os
import pickle
import re
import socket
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

import dmuon
from dmuon.kernels import Variant, backend_fault, drop_graphs, muon_update_, orthogonalize
from dmuon.platform.files import write_bytes
from dmuon.tools.check import (
    TOPOLOGIES,
    Layout,
    Line,
    Reference,
    check_layout,
    layout_of,
    newton_schulz,
    train_alone,
)
from dmuon.tools.cli import FAILED, BadArgument, Parser, number, removed, require_target

_ALWAYS = "leave it out: all topologies that fit, all dtypes and both residencies are tried"
_REMOVED = {
    **dict.fromkeys(("--topologies", "--quick", "--reshard", "--keep", "--dtype", "--budget"), _ALWAYS),
    **dict.fromkeys(("--width", "--layers", "--tokens"), "write bench/step.py, which times a step"),
    "--limit": "leave it out: a difference beyond its limit is an error",
    "--ranks": "write torchrun --nproc-per-node N --no-python dmuon-check --first-run",
}
_NO_BUILD = "the kernel does not build"  # how a fault of the compiler begins, others are of the device
_SHAPES = ((1024, 1024), (2000, 3072), (2048, 4096), (4096, 1024))  # small and large: products of torch's, and tiles
# Limits of Newton-Schulz on Gaussian matrices: half precision is amplified where singular values are small.
_LIMITS = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 2e-4}
# The program of a rank. Where it starts counts for nothing: a clone's folder dmuon/ would hide the installed package.
_RANK = "import sys; sys.path = [x for x in sys.path if x]; from dmuon.tools.cli.check import main; sys.exit(main())"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0, 1 where a check failed, or 2 after a message on stderr."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    kind = arguments.device or ("cuda" if arguments.first_run or torch.cuda.is_available() else "cpu")
    if kind == "cuda" and (fault := cuda_fault()):
        parser.error(fault)
    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    name = arguments.json or ("dmuon-first-run.json" if arguments.first_run else None)
    path = Path(name) if name and os.environ.get("RANK", "0") == "0" else None
    if path is not None:
        try:
            require_target("--json", path)
        except BadArgument as error:
            parser.error(str(error))
    if arguments.first_run and "RANK" not in os.environ:
        command = launch(gpus, sys.argv[1:] if argv is None else argv)
        os.execv(command[0], command)
    here, many = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shared = arguments.first_run and gpus == 1 and many > 1  # NCCL refuses two ranks on one GPU, gloo does not
    if gpus and here >= gpus and not shared:
        parser.error(f"no CUDA device {here}, {gpus} are here; start fewer ranks per host")
    device = torch.device(kind, here % gpus) if gpus else torch.device(kind)
    backend = "nccl" if gpus and not shared else "gloo"
    try:
        ranks = Ranks(backend, timedelta(seconds=arguments.timeout))
    except (RuntimeError, ValueError, OSError) as error:
        parser.error(f"the ranks did not come together: {error}")
    board = Board(ranks, path)
    try:
        hosts = describe(board, ranks.gather(Machine.here(device, backend)))
        if ranks.world == 1:
            board.add(Line("environment", "several ranks: torchrun --nproc-per-node 8 --no-python dmuon-check"))
        if not board.failed:  # ranks that are not alike would differ, or hang
            if arguments.first_run:
                check_kernels(board, device)
            for layout, reference in _layouts(board, device, hosts):
                with ranks.process_group():
                    board.judge("training", str(layout), partial(check_layout, layout, reference))
    except Stopped as stop:
        board.add(Line("all further", f"the ranks no longer run the same collectives after {stop}", status="skip"))
        board.count()
    except Exception as error:  # the ranks can no longer be brought together: end at once, and torchrun the others
        print(f"dmuon-check: rank {ranks.rank}: {type(error).__name__}: {error}", file=sys.stderr)
    else:
        board.count()
        return FAILED if board.failed else 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED)  # without destructors: those of process groups wait for ranks that may be gone


def launch(gpus: int, arguments: Sequence[str]) -> list[str]:
    """The command of a first run: a rank for each of up to 8 GPUs; two on a single one, and on the CPU."""
    ranks = f"--nproc-per-node={min(gpus, 8) if gpus > 1 else 2}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks]
    return [*torchrun, "--no-python", sys.executable, "-c", _RANK, *arguments]


def _layouts(board: Board, device: torch.device, hosts: int) -> Iterator[tuple[Layout, Reference]]:
    """What is tried, and what one process makes of it."""
    references: dict[torch.dtype, Reference] = {}
    for name in TOPOLOGIES:
        layout = layout_of(name, board.ranks.world, hosts)
        if name == "tp" and device.type == "cuda" and board.ranks.backend == "gloo":
            layout = "needs a GPU for each rank: gloo gathers activations on the CPU alone"
        if isinstance(layout, str):
            board.add(Line("parity", layout, status="skip", where=name))
            continue
        shards = dict(layout.dims).get("shard", 1)  # without them nothing can be freed
        layouts = [replace(layout, keep=keep) for keep in (False, True) if keep or shards > 1]
        if device.type != "cpu":  # where dmuon's choice for Newton-Schulz is fp16
            layouts += [replace(each, ns_dtype=None) for each in layouts]
        layouts.append(replace(layouts[0], dtype=torch.bfloat16))
        for each in layouts:
            if each.dtype not in references:
                references[each.dtype] = train_alone(board.ranks.world, device, each.dtype)
            yield each, references[each.dtype]


def _parser() -> argparse.ArgumentParser:
    parser = Parser("dmuon-check", __doc__ or "", argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-run", action="store_true", help="on new GPUs: all there is to check, into one file")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda (NCCL) if there is any, else cpu")
    parser.add_argument("--json", metavar="FILE", help="write all lines there (--first-run: dmuon-first-run.json)")
    limit = number("number of seconds from 1 to 1e6", lambda value: 1 <= value <= 1e6)
    parser.add_argument("--timeout", type=limit, default=60.0, help="seconds for a collective (default: 60)")
    for name, instead in _REMOVED.items():
        parser.add_argument(name, nargs="?", const="", type=removed(instead), help=argparse.SUPPRESS)
    return parser


# -- what the check runs on, and the kernels there against fp64 ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """One rank's software and device.

    Attributes:
        software: versions of torch and dmuon, and the back end.
        fault: why the Triton kernels cannot run; None if they can, and on CPUs.
    """

    software: str
    device: str
    host: str
    fault: str | None = None

    @classmethod
    def here(cls, device: torch.device, backend: str) -> Machine:
        """This process, which computes on ``device``; on a GPU the kernels are built once."""
        versions, host = f"torch {torch.__version__}, dmuon {dmuon.__version__}", socket.gethostname()
        if device.type == "cpu":
            return cls(f"{versions}, {backend}", "CPU", host)
        torch.cuda.set_device(device)
        if backend == "nccl":
            backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")  # what torch and compilers deprecate is no fault
            warnings.filterwarnings("always", "the fused update kernels")
            fault = backend_fault("triton", device, torch.float16)
            _update(device, 8, 16, torch.float16)  # warns where the fused passes do not build
        fault = fault or next((f"{_NO_BUILD}: {one.message}" for one in caught), None)
        return cls(f"{versions}, {backend}", torch.cuda.get_device_name(device), host, fault)


def cuda_fault() -> str | None:
    """Why CUDA does not start, and the remedy; None if it does."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install one of https://pytorch.org, or --device cpu"
    try:
        torch.cuda.init()
    except Exception as error:  # whatever a driver may raise that is missing, too old, or in trouble
        said = " ".join(str(error).split())
        return (
            f"CUDA does not start ({said}); install or update the NVIDIA driver, see that nvidia-smi lists the GPUs "
            "and CUDA_VISIBLE_DEVICES hides none, or take --device cpu"
        )
    return None


def describe(board: Board, machines: Sequence[Machine]) -> int:
    """Add lines about ranks, devices and versions; what forbids a check fails. Returns the number of hosts."""
    first, hosts = machines[0], len({machine.host for machine in machines})
    where = f"{len(machines)} rank{'s' if len(machines) > 1 else ''}"
    devices = ", ".join(f"{n} × {name}" for name, n in Counter(m.device for m in machines).items())
    board.add(Line("environment", f"{first.software}, {hosts} host{'s' * (hosts > 1)}, {devices}", where=where))
    one_kind = "choose GPUs of one kind by CUDA_VISIBLE_DEVICES"
    for name, remedy in {"software": "install the same everywhere", "device": one_kind}.items():
        found = {getattr(machine, name): rank for rank, machine in reversed(list(enumerate(machines)))}
        if len(found) > 1:
            each = "; ".join(f"{value} on rank {rank}" for value, rank in found.items())
            text = f"ranks differ in {name}: {each}; {remedy}"
            board.add(Line("environment", text, status="fail", where=where))
    for rank, machine in enumerate(machines):
        if machine.fault is not None:
            build = machine.fault.startswith(_NO_BUILD)
            remedy = "Triton needs a C compiler (gcc, or CC), all of its wheel, and a driver as new as its CUDA"
            text = f"rank {rank}: {machine.fault}; {remedy if build else 'cuBLAS and operations of torch run, slower'}"
            board.add(Line("environment", text, status="fail" if build else "warn", where=where))
    return hosts


def check_kernels(board: Board, device: torch.device) -> None:
    """Add the lines of every rank's device, without communication."""
    scale = 16 if device.type == "cpu" else 1
    for (m, n), dtype in product(_SHAPES, _LIMITS):
        where = f"{str(dtype).removeprefix('torch.')} {m // scale}x{n // scale}"
        board.judge("kernels", where, partial(_update, device, m // scale, n // scale, dtype))
    if device.type == "cuda":
        board.judge("kernels", "replay of a graph", partial(replays, device, 64, 192))


def _update(device: torch.device, m: int, n: int, dtype: torch.dtype) -> list[Line]:
    """A whole update of three matrices as a step runs it, and singular values of what has low rank."""
    params, grads, momentum, low = (_gaussian(device, 3, m, n, seed) for seed in range(4))
    weights, average = params.double(), torch.lerp(momentum.double(), grads.double(), 0.05)
    exact = newton_schulz(torch.lerp(grads.double(), average, 0.95))
    some = [*params.unbind()], [*grads.unbind()], momentum
    muon_update_(*some, lr=0.5, weight_decay=0.0, beta=0.95, nesterov=True, scale=1.0, dtype=dtype)
    low[:, min(m, n) // 4 :, min(m, n) // 4 :] *= 1e-4
    largest = float(torch.linalg.matrix_norm(orthogonalize(low, dtype=dtype).float(), ord=2).max())
    average_error = float((momentum - average).norm() / average.norm())
    error = float((weights - params - 0.5 * exact).norm() / (0.5 * exact).norm())
    return [
        Line("kernels", "momentum", average_error, 1e-6, "relative error"),
        Line("kernels", "change of the weights", error, _LIMITS[dtype], "relative error"),
        Line("kernels", "nearly singular matrices", largest, 1.3, "largest singular value"),
    ]


def _gaussian(device: torch.device, k: int, m: int, n: int, seed: int) -> Tensor:
    return torch.randn(k, m, n, generator=torch.Generator().manual_seed(seed)).to(device)


def replays(device: torch.device, m: int, n: int) -> list[Line]:
    """Batches by a CUDA graph, bitwise as by single launches: at once, and in a backward after all graphs were dropped.

    Raises:
        UserWarning: nothing was captured.
    """
    eager = Variant("standard", (), "torch", 4)
    x = [_gaussian(device, 2, m, n, seed) for seed in range(2)]
    found: list[Tensor] = []

    def replay(_gradient: object = None) -> None:
        found.extend(orthogonalize(each, variant=replace(eager, replay=True)) for each in x)

    leaf = torch.ones(1, device=device, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(replay)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no CUDA graph")
        replay()
        drop_graphs()
        (2 * leaf).sum().backward()
    drop_graphs()
    expected = [orthogonalize(each, variant=eager) for each in 2 * x]
    unequal = sum(int((one != each).sum()) for one, each in zip(found, expected, strict=True))
    return [Line("kernels", "entries that differ from single launches'", unequal)]


# -- what the ranks tell each other, and the lines of the report: judged over all ranks, printed by the first one ------

_MINUTE = timedelta(minutes=1)


class Stopped(Exception):
    """An error on some ranks only: they no longer run the same collectives, so nothing more can be checked."""


class Ranks:
    """All processes of the launch, or this one alone where nothing launched several.

    They exchange Python objects through the rendezvous store, which works where collectives fail.

    Args:
        backend: back end of process groups.
        timeout: limit of their collectives; :meth:`gather` waits three times as long for the slowest rank, or a minute.

    Raises:
        RuntimeError, ValueError: the processes did not find each other.
    """

    def __init__(self, backend: str, timeout: timedelta) -> None:
        self.rank, self.world = 0, 1
        self.timeout = timeout
        self._store: Store = dist.HashStore()  # type: ignore[attr-defined]
        if "RANK" in os.environ:
            found = dist.rendezvous("env://", timeout=max(timeout, _MINUTE))  # type: ignore[attr-defined]
            self._store, self.rank, self.world = next(found)
        self.backend = backend
        self._rounds = 0

    @contextmanager
    def process_group(self) -> Iterator[None]:
        """The default group; with it end all others, each of which holds a communicator on NCCL."""
        self._rounds += 1
        store = PrefixStore(f"dmuon-check/group/{self._rounds}", self._store)  # names of groups recur
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.world, timeout=self.timeout)
        yield
        gc.collect()  # the modules and the hooks of a dedicated model refer to each other
        dist.destroy_process_group()

    def gather(self, item: Any) -> list[Any]:
        """Every rank's ``item``, by rank; all ranks make the same series of calls.

        Raises:
            RuntimeError: a rank did not come in time, or the store is gone with its process.
        """
        self._rounds += 1
        keys = [f"dmuon-check/gather/{self._rounds}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], base64.b64encode(pickle.dumps(item)).decode())
        self._store.wait(keys, max(3 * self.timeout, _MINUTE))
        # These bytes were written by this program on another rank.
        return [pickle.loads(base64.b64decode(self._store.get(key))) for key in keys]


class Board:
    """Collects lines; every rank holds all of them. Rank 0 prints them, and writes them to a file as they come.

    Args:
        path: where rank 0 writes, if anywhere: a run that hangs or dies leaves what came before.
    """

    def __init__(self, ranks: Ranks, path: Path | None = None) -> None:
        self.ranks = ranks
        self.lines: list[Line] = []
        self._path = path

    @property
    def failed(self) -> int:
        """How many lines failed."""
        return sum(line.status == "fail" for line in self.lines)

    def add(self, line: Line) -> None:
        """Add a line; the same on all ranks."""
        self.lines.append(line)
        if self.ranks.rank == 0:
            print(line, flush=True)
            if self._path is not None:
                status = int(self.failed > 0) if line.check == "all" else None  # that is the last one
                report = {"exit_status": status, "world": self.ranks.world, "lines": [*map(asdict, self.lines)]}
                write_bytes(self._path, f"{json.dumps(report, indent=1)}\n".encode())

    def judge(self, check: str, where: str, work: Callable[[], list[Line]]) -> None:
        """Run ``work`` on every rank and add a line for each that it returns; an error is a line named ``check``.

        What takes much longer than one collective may ends the process, with the stacks of its threads and exit
        status 1; torchrun then ends the others.

        Raises:
            Stopped: not all ranks had the same error, or a collective failed.
        """
        said: str | None = None
        fatal = False
        readings: list[Line] = []
        seconds = 4 * self.ranks.timeout.total_seconds()
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
        try:
            readings = work()
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            fatal = isinstance(error, (dmuon.CollectiveError, dist.DistError))
            traceback.print_exc()
            print(f"dmuon-check: rank {self.ranks.rank}: {check} {where}: {said}", file=sys.stderr, flush=True)
        everyone = self.ranks.gather((said, fatal, readings))
        faulthandler.cancel_dump_traceback_later()
        errors = {rank: text for rank, (text, _, _) in enumerate(everyone) if text is not None}
        if not errors:
            for rows in zip(*(theirs for _, _, theirs in everyone), strict=True):
                fails = [row for row in enumerate(rows) if not row[1].value <= row[1].limit]  # NaN fails
                rank, line = max(fails or enumerate(rows), key=lambda row: row[1].value)
                text = f"{line.text}; {line.unit} {line.value:.2g} (limit {line.limit:.2g})" if line.unit else line.text
                text += f", on rank {rank}" if fails else ""
                self.add(replace(line, status="fail" if fails else "pass", where=where, text=text))
            return
        rank, text = next(iter(errors.items()))
        self.add(Line(check, f"on {len(errors)} ranks, first rank {rank}: {text}", status="fail", where=where))
        kinds = {text and re.sub(r"\d+", "", text) for text, _, _ in everyone}
        if len(kinds) > 1 or any(hopeless for _, hopeless, _ in everyone):
            raise Stopped(f"{check} {where}")

    def count(self) -> None:
        """Add the last line, which counts those before."""
        total = sum(line.status in ("pass", "fail") for line in self.lines)
        text = f"{self.failed} of {total} failed" if self.failed else f"{total} checks"
        self.add(Line("all", text, status="fail" if self.failed else "pass"))


if __name__ == "__main__":
    sys.exit(main())
