"""Text as bytes: the standard library's sources, split into training and validation; batches by step and rank."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

EVALUATION_WINDOWS = 256
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_SEPARATOR = b"\x00"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Train and validation text, each a 1-D uint8 tensor of bytes."""

    name: str
    train: Tensor
    validation: Tensor

    def batch(self, seed: int, step: int, rank: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
        """Random training windows and their next bytes, both `(batch, context)` int64.

        A pure function of its arguments, so that a resumed run sees exactly the data it would have seen.
        """
        digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        starts = torch.randint(len(self.train) - context, (batch,), generator=generator)
        return _windows(self.train, starts, context)

    def evaluation_batch(self, index: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Validation windows number `index`, out of `EVALUATION_WINDOWS` evenly spaced ones."""
        starts = index * (len(self.validation) - context - 1) // (EVALUATION_WINDOWS - 1)
        return _windows(self.validation, starts, context)


def load_corpus() -> Corpus:
    """The standard library's sources, which every machine has.

    Files in the order of the hash of their name go to validation until it holds at least 5 % and at most 10 % of the
    bytes.
    """
    root, files = Path(sysconfig.get_paths()["stdlib"]), {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") for part in relative.parts)
        if hidden or not _SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]) or not path.is_file():
            continue
        content = path.read_bytes()
        if content and _SEPARATOR not in content:  # a NUL byte: not a text
            files[relative.as_posix()] = content
    total, held, chosen = sum(map(len, files.values())), 0, set()
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if held < total / 20 and held + len(files[name]) <= total / 10:
            chosen.add(name)
            held += len(files[name])
    train, validation = (
        _SEPARATOR.join(files[name] for name in sorted(files) if (name in chosen) == held_out)
        for held_out in (False, True)
    )
    return Corpus("Python standard library", _tensor(train), _tensor(validation))


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    window = text[starts[:, None] + torch.arange(context + 1)].long()  # (batch, context + 1)
    return window[:, :-1], window[:, 1:]
