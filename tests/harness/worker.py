"""A worker of the pool: one process that runs one call after another, and the process groups that it keeps between."""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.distributed.distributed_c10d as c10d
import torch.distributed.tensor.debug
from torch.distributed.device_mesh import DeviceMesh

_WORLD: Any = c10d._world  # where torch keeps its groups
COLLECTIVE_SECONDS = 30.0
_NAMES_PER_CALL = 1000  # torch names groups by a counter; groups of other calls have other names


def dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)  # plain bytes: no shared memory that could outlive or precede its sender
    return buffer.getvalue()


def load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True, slots=True)
class Call:
    """What precedes a function and its arguments.

    Attributes:
        number: of the call, the same on all ranks and of no other call.
        generation: of the groups over ``world`` ranks that the call may use; a new one has none yet.
        alone: no groups of other worlds may exist meanwhile.
    """

    path: list[str]
    world: int
    number: int
    generation: int
    alone: bool
    port: int


class OneThreadGloo(c10d.ProcessGroupGloo):  # type: ignore[name-defined, misc]
    """A gloo group with one worker thread, where torch starts two.

    torch 2.13's worker threads assign the name of the work they completed to one string without a lock. Names of over
    15 characters are on the heap, ALLGATHER_COALESCED among them, which is what DTensors gather with: two works that
    complete at once then corrupt the heap, and the process dies of it sooner or later. With 16 threads a loop of such
    gathers dies in seconds. dmuon's own collectives have shorter names.

    All groups of a worker share one device: each has a thread that wakes a hundred times a second, used or not.
    """

    shared: Any = None

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_newer: Any) -> None:
        # torch 2.15 says `enable_reconfigure` too, for groups whose ranks change: a pool's do not.
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        if OneThreadGloo.shared is None:
            OneThreadGloo.shared = c10d.ProcessGroupGloo.create_default_device()  # type: ignore[attr-defined]
        options._devices = [OneThreadGloo.shared]
        options._timeout = timeout
        options._threads = 1
        super().__init__(store, rank, size, options)


def _registries() -> list[dict[Any, Any]]:
    """Where torch keeps the groups that exist, the default one included."""
    return [
        _WORLD.pg_map,
        _WORLD.pg_names,
        _WORLD.pg_group_ranks,
        _WORLD.pg_backend_config,
        _WORLD.tags_to_pg,
        _WORLD.pg_to_tag,
    ]


@dataclass
class _Environment:
    """The default group of one world and the groups of its meshes, while another may be torch's."""

    generation: int
    default: Any
    client: Any
    meshes: dict[Any, DeviceMesh] = field(default_factory=dict)
    registries: list[dict[Any, Any]] = field(default_factory=list)

    def enter(self, number: int) -> None:
        """Make it torch's, with a part of the store to itself: names of groups recur from call to call."""
        for registry, kept in zip(_registries(), self.registries, strict=True):
            registry.clear()
            registry.update(kept)
        _WORLD.pg_map[self.default] = ("gloo", dist.PrefixStore(f"call{number}", self.client))
        c10d._update_default_pg(self.default)

    def leave(self) -> None:
        """Destroy the groups of this call, and keep the others."""
        kept = {self.default}
        for mesh in self.meshes.values():
            kept.update(mesh._pg_registry.values())
        for group in [group for group in _WORLD.pg_map if group not in kept]:
            dist.destroy_process_group(group)
        self.registries = [
            {key: list(value) if isinstance(value, list) else value for key, value in registry.items()}
            for registry in _registries()
        ]
        for registry in _registries():
            registry.clear()
        c10d._update_default_pg(None)

    def end(self) -> None:
        """Destroy all its groups, one by one: torch forgets those of other worlds when a default group goes."""
        for group in sorted(self.registries[1], key=self.registries[1].__getitem__, reverse=True):
            group.shutdown()
            c10d._unregister_process_group(group.group_name)


class _Groups:
    """The environments of a worker by world, and the meshes that the call makes.

    DTensor keeps what it derived for a mesh and returns it for an equal one, with the groups of the first. So equal
    calls of ``init_device_mesh`` get one mesh while its groups live, and any other mesh equals none of another call.
    """

    def __init__(self) -> None:
        self.environments: dict[int, _Environment] = {}
        self.current: _Environment | None = None
        self.number = 0
        self.init_device_mesh = device_mesh.init_device_mesh
        self.init = DeviceMesh.__init__
        device_mesh.init_device_mesh = dist.init_device_mesh = self.kept_mesh  # type: ignore[assignment, attr-defined]
        groups = self

        def init(mesh: DeviceMesh, *args: Any, _root_mesh: DeviceMesh | None = None, **kwargs: Any) -> None:
            groups.init(mesh, *args, _root_mesh=_root_mesh, **kwargs)
            mesh._thread_id = groups.number if _root_mesh is None else _root_mesh._thread_id  # what equality compares

        DeviceMesh.__init__ = init  # type: ignore[method-assign]

    def enter(self, rank: int, call: Call) -> None:
        self.number = call.number
        for world, environment in list(self.environments.items()):
            if call.alone or (world == call.world and environment.generation != call.generation):
                environment.end()
                del self.environments[world]
                # DTensor would keep the groups of meshes that nobody can use any more.
                torch.distributed.tensor.debug._clear_sharding_prop_cache()
        _WORLD.group_count = 0 if call.alone else call.number * _NAMES_PER_CALL
        self.current = self.environments.get(call.world)
        if self.current is None:
            limit = timedelta(seconds=COLLECTIVE_SECONDS)
            client = dist.TCPStore("127.0.0.1", call.port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
            store = dist.PrefixStore(f"call{call.number}", client)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=rank, world_size=call.world, timeout=limit)
            self.current = _Environment(call.generation, dist.group.WORLD, client)
            self.environments[call.world] = self.current
        else:
            self.current.enter(call.number)

    def leave(self) -> bool:
        """Whether the groups of all worlds live on."""
        environment, self.current = self.current, None
        if environment is None:  # the group was not even made
            return False
        if dist.is_initialized() and dist.group.WORLD is environment.default:
            environment.leave()
            return True
        if dist.is_initialized():
            dist.destroy_process_group()
        self.environments.clear()  # with its default group torch forgot all others
        return False

    def kept_mesh(
        self, device_type: str, mesh_shape: tuple[int, ...], *, mesh_dim_names: Any = None, **options: Any
    ) -> DeviceMesh:
        def make() -> DeviceMesh:
            return self.init_device_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names, **options)

        if self.current is None or options or _WORLD.default_pg is not self.current.default:
            return make()
        key = device_type, tuple(mesh_shape), None if mesh_dim_names is None else tuple(mesh_dim_names)
        mesh = self.current.meshes.get(key)
        if mesh is None:
            mesh = self.current.meshes[key] = make()
        return mesh


def begin(log: str) -> None:
    """A process of one thread, which writes to a file whatever it prints, and its stacks when it is asked for them."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=descriptor)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)


def work(rank: int, connection: Connection, log: str) -> None:
    """The worker process: one call after another until the pipe closes."""
    c10d.ProcessGroupGloo = OneThreadGloo  # type: ignore[attr-defined]
    begin(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then kills the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()
    groups = _Groups()
    environment = dict(os.environ)
    directory = os.getcwd()
    forget_garbage()
    connection.send_bytes(b"ready")
    while True:
        try:
            call: Call = pickle.loads(connection.recv_bytes())
            program = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_execute(rank, groups, call, program))
        if connection.recv_bytes() != b"release":
            return
        problem, intact = None, False
        try:
            intact = groups.leave()
        except Exception:
            problem = traceback.format_exc()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        forget_garbage()
        connection.send_bytes(pickle.dumps((problem, intact)))


_count, _freeze = gc.get_freeze_count, gc.freeze


def forget_garbage() -> None:
    """Collect what there is; the next collection passes over what stays, modules and caches.

    dmuon brings back what is frozen, since its user may have frozen the model: it hears of none of this, until a test
    freezes something itself. To count what is frozen takes as long as to walk over it.
    """
    gc.collect()
    _freeze()
    gc.get_freeze_count, gc.freeze = int, _freeze_and_tell


def _freeze_and_tell() -> None:
    _freeze()
    gc.get_freeze_count = _count


def _execute(rank: int, groups: _Groups, call: Call, program: bytes) -> bytes:
    """Runs one call; returns the reply, whatever happens."""
    try:
        sys.path[:] = call.path
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        random.seed(0)
        torch.manual_seed(0)
        groups.enter(rank, call)
        fn: Callable[..., Any]
        fn, args = load(program)
        return dump({"value": fn(rank, call.world, *args)})
    except BaseException as error:
        return dump(
            {
                "error": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "bases": tuple(qualified_name(base) for base in type(error).__mro__),
            }
        )


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
