"""Compiles the pretended device, once for each version of torch and of its source."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_cxx_compiler, include_paths, library_paths

__all__ = ["Unbuildable", "library"]

FLAGS = ("-std=c++20", "-O0", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
LIBRARIES = ("-lc10", "-ltorch", "-ltorch_cpu")
HERE = Path(__file__).parent
SOURCES = [HERE / f"{name}.cpp" for name in ("device", "operators", "collectives")]
FOLDER = HERE.parents[1] / "build" / "pretend"


class Unbuildable(Exception):
    """There is no compiler, or it fails; the message says which and why."""


@cache
def library() -> Path:
    """The shared library, built now unless it lies in ``build/``, where ``make clean`` removes it.

    Raises:
        Unbuildable: with what a person needs to know.
    """
    if sys.platform != "linux":
        raise Unbuildable(f"the pretended device is built on Linux only, this is {sys.platform}")
    compiler = shutil.which(get_cxx_compiler())
    if compiler is None:
        raise Unbuildable(f"there is no C++ compiler: {get_cxx_compiler()!r} is not found; install g++, or set CXX")
    FOLDER.mkdir(parents=True, exist_ok=True)
    texts = (path.read_text() for path in (HERE / "pretend.h", *SOURCES))
    made_of = "\0".join((torch.__version__, compiler, *FLAGS, *texts))
    target = FOLDER / f"pretend-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several pytest processes; the kernel releases it when its holder dies
        if not target.exists():
            _compile(compiler, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    """Make ``target``, whole or not at all."""
    begin = time.monotonic()
    unfinished = target.with_suffix(".unfinished")
    includes = [flag for folder in include_paths() for flag in ("-isystem", folder)]
    paths = [flag for folder in library_paths() for flag in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    command = [compiler, "-shared", *FLAGS, *includes, "-x", "c++", "-", *paths, *LIBRARIES, "-o", str(unfinished)]
    sources = "".join(f'#include "{path}"\n' for path in SOURCES)  # headers of torch are read once
    done = subprocess.run(command, input=sources, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        said = "\n".join(lines[:10])
        raise Unbuildable(f"{compiler} fails on the pretended device with torch {torch.__version__}:\n{said}")
    os.replace(unfinished, target)
    print(f"built {target.name} in {time.monotonic() - begin:.0f} s", file=sys.stderr)
