"""Faults, done by the rank itself at a place that can be found again: so many calls into a phase of its program."""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pulp
import torch
import torch.distributed.checkpoint as dcp

from dmuon.solver import CostTable, SolveOptions

ROOM = 2048  # bytes that a file may have on a full disk
SLOW_SECONDS = 1.0
OTHER_HIDDEN = 31
OTHER_OPTIONS = {"lr": 3e-3, "momentum": 0.9, "ns_steps": 4, "weight_decay": 0.0}
TIME_LIMIT = 2.0  # of a solver
HARD = CostTable(  # for the planner: it asks the solver dozens of times
    {
        (13, 13): {1: 631, 2: 918, 3: 1330, 4: 1873, 5: 2107, 6: 2354},
        (13, 29): {1: 848, 2: 1226, 3: 1882, 4: 2223, 5: 3024, 6: 3525},
    }
)


NOTHING: dict[str, Any] = {"name": "", "detail": "", "phase": "", "step": -1, "calls": 0}


class Planted(Exception):
    pass


class SlowWriter(dcp.FileSystemWriter):
    """Waits in one of its parts."""

    def __init__(self, path: Path, where: str) -> None:
        super().__init__(path)
        self._where = where

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        if self._where == "write":
            time.sleep(SLOW_SECONDS)
        return super().write_data(*args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        if self._where == "finish":
            time.sleep(SLOW_SECONDS)
        super().finish(*args, **kwargs)


class Injector:
    """The fault of one rank, or none.

    Attributes:
        calls: how many calls dmuon (in saves and loads also torch's checkpoints) made in each phase of each step.
    """

    def __init__(self, fault: dict[str, Any] | None, out: Path, rank: int, root: Path) -> None:
        self._fault = fault or NOTHING
        self._out, self._rank = out, rank
        self._watched = tuple(str(root / part) for part in ("dmuon", "solver", "kernels"))
        self._checkpoints = str(Path(dcp.__file__).parent)
        self._fired = False
        self.calls: dict[str, int] = {}

    # -- when ------------------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Count calls, and act at the one that was drawn, or at the end where there are fewer."""
        here = self._is(name, step)
        if here:
            self._enter()
        if here or self._fault["name"] == "count":
            count = 0
            known: dict[CodeType, bool] = {}
            prefixes = (*self._watched, self._checkpoints) if name in ("save", "load") else self._watched

            def watch(frame: FrameType, event: str, _: Any) -> None:
                nonlocal count
                if event != "call":
                    return
                code = frame.f_code
                if code not in known:
                    known[code] = code.co_filename.startswith(prefixes)
                if known[code]:
                    count += 1
                    if here and count == self._fault["calls"]:
                        self._act()

            sys.setprofile(watch)
            try:
                yield
            finally:
                sys.setprofile(None)
                if here:
                    self.lift()
            self.calls[f"{name} {step}"] = count
            if here:
                self._act()
        else:
            yield

    def settle(self) -> None:
        """At the end of training: the fault has come."""
        if self._fault["name"] not in ("", "count") and not self._fired:
            raise AssertionError("the fault never came")

    def _is(self, phase: str, step: int) -> bool:
        return bool(self._fault["phase"] == phase and self._fault["step"] == step)

    def _stamp(self, ask: str = "") -> None:
        """Tell whoever watches."""
        self._fired = True
        path = self._out / f"fault-{self._rank}"
        path.with_suffix(".tmp").write_text(json.dumps({"time": time.monotonic(), "ask": ask, "pid": os.getpid()}))
        path.with_suffix(".tmp").rename(path.with_suffix(".json"))

    # -- at any moment ---------------------------------------------------------------------------------------------

    def _act(self) -> None:
        if self._fired:
            return
        match self._fault["name"]:
            case "kill":
                self._stamp()
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                self._stamp()
                os.kill(os.getpid(), signal.SIGSTOP)
            case "pause":
                self._stamp(f"continue {self._fault['detail']}")
                os.kill(os.getpid(), signal.SIGSTOP)
            case "interrupt one":
                self._stamp()
                os.kill(os.getpid(), signal.SIGINT)
            case "interrupt all":
                self._stamp("interrupt all")
                os.kill(os.getpid(), signal.SIGINT)

    # -- at one place ----------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """What begins with a phase."""
        match self._fault["name"]:
            case "full disk" | "full disk for costs":
                self._stamp()
                resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))

    def lift(self) -> None:
        """There is room again."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def prepare(self) -> None:
        """What is so from the start."""
        os.environ["XDG_CACHE_HOME"] = self._fault.get("cache") or str(self._out)
        os.environ["TMPDIR"] = str(self._out)
        match self._fault["name"]:
            case "solver":
                self._stamp()
                pulp.PULP_CBC_CMD.pulp_cbc_path = self._fault["path"]
            case "torn checkpoint" | "bad plan" | "bad costs" | "bad cost cache":
                self._stamp()

    def planning(self) -> dict[str, Any]:
        """Options of planning."""
        match self._fault["name"]:
            case "solver":
                options = SolveOptions(method="milp", gap_target=0.0, time_limit_s=TIME_LIMIT)
                return {"solve": options, "costs": HARD}
            case "bad plan":
                return {"plan": self._fault["path"], "costs": None}
            case "bad costs":
                return {"costs": self._fault["path"]}
            case "bad cost cache" | "full disk for costs" | "measure":
                return {"costs": None}
        if self._fault["name"] == "other options" and self._fault["detail"] == "costs":
            self._stamp()
            return {"costs": None}
        return {}

    def hidden(self) -> tuple[int, ...]:
        if self._fault["name"] != "other model":
            return ()
        self._stamp()
        return (OTHER_HIDDEN,)

    def options(self, muon: dict[str, Any]) -> dict[str, Any]:
        if self._fault["name"] != "other options" or self._fault["detail"] == "costs":
            return muon
        self._stamp()
        return {**muon, self._fault["detail"]: OTHER_OPTIONS[self._fault["detail"]]}

    def seen(self, folder: Path) -> Path:
        """The checkpoint as this rank finds it."""
        return Path(self._fault.get("instead") or folder)

    def writer(self, path: Path) -> dcp.FileSystemWriter:
        if self._fault["name"] == "slow disk" and not self._fired:
            self._stamp()
            return SlowWriter(path, self._fault["detail"])
        return dcp.FileSystemWriter(path)

    def goes_on(self) -> bool:
        """The user catches what a save raised."""
        self.lift()
        return "goes on" in self._fault["detail"]

    def skips_batch(self, step: int) -> bool:
        if not self._is("data", step):
            return False
        self._stamp()
        if self._fault["name"] == "raise":
            raise Planted("the user's own mistake in the loader")
        return True

    def data(self, step: int, tensors: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if self._fault["name"] != "empty batch" or not self._is("forward", step):
            return tensors
        self._stamp()
        return tensors[0][:0], tensors[1][:0]

    def loss(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        if not self._is("loss", step):
            return loss
        self._stamp()
        if self._fault["name"] == "raise":
            raise Planted("the user's own mistake in the loss")
        return loss * float("nan")

    def skips_step(self, trainer: Any, step: int) -> bool:
        if not self._is("step", step):
            return False
        match self._fault["name"]:
            case "skips the step":
                self._stamp()
                return True
            case "planted wrong number":
                self._stamp()
                with torch.no_grad():
                    next(trainer.network.embed.parameters()).mul_(1.01)
            case "other rate":
                self._stamp()
                for group in trainer.optimizer.param_groups:
                    group[self._fault["detail"]] = OTHER_OPTIONS[self._fault["detail"]]
        return False

    def before_evaluation(self, trainer: Any) -> None:
        if self._fault["name"] == "other order in evaluation":
            self._stamp()
            trainer.network.order = (1, 0, 2)

    def after_evaluation(self, trainer: Any) -> bool:
        """Whether the evaluation counts: where ranks need nothing of each other for it, another order is harmless."""
        trainer.network.order = (0, 1, 2)
        return str(self._fault["name"]) != "other order in evaluation"

    def before_forward(self, trainer: Any, step: int) -> None:
        """What a user's program changes, or where it raises."""
        if self._fault["name"] in ("other order", "skipped block"):
            trainer.network.order = (0, 1, 2)
        if self._fault["name"] == "raise" and self._is("save", step):
            trainer.network.blocks[1].up.register_state_dict_pre_hook(self._mistake)
        if self._fault["name"] == "raise" and self._is("backward", step):
            trainer.network.blocks[1].register_forward_hook(self._mistake_in_backward)
        if not self._is("forward", step):
            return
        match self._fault["name"]:
            case "raise":
                trainer.network.blocks[1].mix.register_forward_pre_hook(self._mistake)
            case "planted hang":
                self._stamp()
                time.sleep(1000)
            case "extra forward":
                self._stamp()
                with torch.no_grad():
                    trainer.laid.model(trainer.laid.mine(self._batch(trainer))[0])
            case "extra backward":
                self._stamp()
                trainer.laid.model(trainer.laid.mine(self._batch(trainer))[0]).sum().backward()
            case "other order":
                self._stamp()
                trainer.network.order = (1, 0, 2)
            case "skipped block":
                self._stamp()
                trainer.network.order = (0, 2)
            case "frozen":
                self._stamp()
                trainer.network.blocks[1].up.weight.requires_grad_(False)

    def _batch(self, trainer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(12, 5, dtype=torch.long)
        return tokens, copy.copy(tokens)

    def _mistake(self, *_: Any) -> None:
        self._stamp()
        raise Planted("the user's own mistake in a hook")

    def _mistake_in_backward(self, _module: Any, _args: Any, output: torch.Tensor) -> None:
        output.register_hook(self._mistake)
