"""Where the pretended device cannot be built, one reads why."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pretend import build


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("no-such-compiler", "there is no C.. compiler: 'no-such-compiler' is not found"),
        ("false", "false fails on device"),
    ],
)
def test_a_compiler_that_is_missing_or_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str, said: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(build, "FOLDER", tmp_path / "build")
    with pytest.raises(build.Unbuildable, match=said):
        build.library.__wrapped__()
    assert [path.name for path in (tmp_path / "build").glob("*")] in ([], ["lock"])


def test_what_is_built_is_not_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a compiler that counts."""
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho >> {calls}\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "FOLDER", tmp_path / "build")
    source = tmp_path / "source"
    shutil.copytree(build.HERE, source, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(build, "HERE", source)
    first = build.library.__wrapped__()
    assert first.exists() and len(calls.read_text()) == len(build.SOURCES) + 1
    assert build.library.__wrapped__() == first
    assert len(calls.read_text()) == len(build.SOURCES) + 1
    (source / "device.cpp").write_text("// another\n")
    assert build.library.__wrapped__() != first
    assert len(calls.read_text()) == len(build.SOURCES) + 3, "one object and the library"
