"""The documentation holds what it says: its code runs, its commands, paths, links and quoted messages exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from harness.fragments import run_fragments
from harness.limits import PROGRAM_SECONDS
from harness.pool import RankPool

import dmuon

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LANGUAGES = {"python", "sh", "text", "json"}
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])


BLOCKS = [block for page in PAGES for block in blocks(page)]
PROGRAMS = [block for block in BLOCKS if block.text.startswith("# example.py")]
FRAGMENTS = [block for block in BLOCKS if block.language == "python" and block not in PROGRAMS]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


# -- code ----------------------------------------------------------------------------------------------------------


def test_every_block_of_code_says_its_language() -> None:
    assert not [block.name for block in BLOCKS if block.language not in LANGUAGES]
    assert len(PROGRAMS) == 1


@pytest.mark.slow
def test_the_whole_program_trains_on_two_nodes(tmp_path: Path) -> None:
    """The command of docs/how-to.md for several nodes, once for each of two nodes, which are this machine."""
    (tmp_path / "example.py").write_text(PROGRAMS[0].text)
    (command,) = (
        line
        for block in BLOCKS
        if block.page == DOCS / "how-to.md"
        for line in block.text.splitlines()
        if line.startswith("torchrun --nnodes 2 ")
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = (
        command.replace("HOST:29500", f"localhost:{port}").replace("--nproc-per-node 8", "--nproc-per-node 1").split()
    )
    run = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    nodes = [
        subprocess.Popen(run, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    try:
        said = [node.communicate(timeout=PROGRAM_SECONDS)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said[0][-3000:] + said[1][-3000:]
    (text,) = (text for text in said if "blocks.3.down.weight" in text)  # rank 0 explains
    losses = [float(line.split()[1]) for line in text.splitlines() if re.fullmatch(r"\d+ \d+\.\d+", line)]
    assert len(losses) == 40 and sum(losses[-5:]) < sum(losses[:5]) - 5 * 0.5, losses
    assert "8 matrices" in text


@pytest.fixture(scope="module")
def faults(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], list[dict[str, str | None]]]:
    """By rank, what came of each fragment that needs a package, or of each that needs none."""

    @cache
    def of_kind(needs: bool) -> list[dict[str, str | None]]:
        kind = [block for block in FRAGMENTS if (needed(block) is not None) == needs]
        runnable = {block.name: block.text for block in kind if not is_missing(needed(block))}
        folder = str(tmp_path_factory.mktemp("fragments"))
        return ranks(2, run_fragments, PROGRAMS[0].text, runnable, folder, timeout=300)

    return of_kind


def needed(block: Block) -> str | None:
    """The package that a fragment names in a first line ``# needs NAME``."""
    found = re.match(r"# needs (\w+)", block.text)
    return None if found is None else found[1]


def is_missing(package: str | None) -> bool:
    return package is not None and importlib.util.find_spec(package) is None


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=[pytest.mark.slow] if needed(block) else []) for block in FRAGMENTS],
    ids=lambda block: block.name,
)
def test_fragments_run(block: Block, faults: Callable[[bool], list[dict[str, str | None]]]) -> None:
    package = needed(block)
    if is_missing(package):
        assert block.page.name not in ("README.md", "guide.md")
        pytest.skip(f"{package} is not installed")
    for rank, outcomes in enumerate(faults(package is not None)):
        assert block.name in outcomes, f"rank {rank} did not come to it: {list(outcomes.values())[-1]}"
        assert outcomes[block.name] is None, f"rank {rank}: {outcomes[block.name]}"


# -- commands and paths --------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, str]]:
    """Every command of a page, in blocks and in the text."""
    for block in BLOCKS:
        if block.language == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                yield block.name, line.split("#")[0].strip()
    for page in PAGES:
        for span in re.findall(r"`((?:make|python|torchrun|dmuon-\w+|pip) [^`]+)`", prose(page)):
            yield str(page.relative_to(ROOT)), span


def test_commands_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for place, command in commands():
        words = command.split()
        while words and ("=" in words[0] and words[0].partition("=")[0].isupper()):
            words.pop(0)
        if not words:
            continue
        if words[0] == "make":
            wrong += [(place, command) for word in words[1:2] if word not in targets]
        for script, options in programs(words):
            if not (ROOT / script).is_file():
                wrong.append((place, f"{command}: {script} is no file"))
            else:
                shared = (ROOT / "bench").glob("*/*.py") if script.startswith("bench/") else ()
                files = [ROOT / script, *shared]
                source = "".join(file.read_text() for file in files)
                wrong += [(place, f"{script} has no {o}") for o in options if not takes(source, o)]
    assert not wrong


def takes(source: str, option: str) -> bool:
    """Whether a program defines an option: in words, or as a field of its settings."""
    field = option[2:].replace("-", "_")
    return f'"{option}"' in source or re.search(rf"^    {field}: ", source, re.MULTILINE) is not None


def programs(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Files of the repository that a command runs, each with the options that it passes."""
    for i, word in enumerate(words):
        options = [w.split("=")[0] for w in words[i + 1 :] if w.startswith("--")]
        if re.fullmatch(r"(bench|tests|docs|examples)/\S+\.py", word):
            yield word, options
        elif re.fullmatch(r"dmuon-\w+", word):
            yield f"dmuon/tools/cli/{word.removeprefix('dmuon-')}.py", options
        elif word == "-m" and words[i + 1].startswith("dmuon."):
            yield words[i + 1].replace(".", "/") + ".py", options


def test_paths_exist() -> None:
    path = re.compile(r"`((?:dmuon|solver|kernels|profiles|tests|bench|docs|examples|\.ci)/[\w./*-]*)`")
    wrong = [
        f"{page.relative_to(ROOT)}: {found}"
        for page in PAGES
        for found in path.findall(prose(page))
        if not any(ROOT.glob(found.rstrip("/")))
    ]
    assert not wrong


# -- links ---------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and the site make them, and of the names that the reference documents."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    names = set(re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE))
    return names | {
        re.sub(r"[^\w\- ]", "", title.replace("`", "")).strip().lower().replace(" ", "-") for title in titles
    }


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if link.startswith(("https://", "http://")):
                continue
            target, _, anchor = link.partition("#")
            file = (page.parent / target).resolve() if target else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert not wrong


# -- what pages say of the code ------------------------------------------------------------------------------------


def test_public_names_are_in_the_reference() -> None:
    """By name; of dmuon.solver and dmuon.kernels whole modules, which the build of the site checks by name."""
    listed = {f"dmuon.{name}" for name in dmuon.__all__}
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    assert {name for name in documented if not name.startswith(("dmuon.kernels.", "dmuon.solver."))} == listed


@pytest.mark.parametrize("program", ["plan", "profile", "check"])
def test_options_of_programs_are_in_the_reference(program: str) -> None:
    page = (DOCS / "reference" / "command-line.md").read_text()
    section = page.split(f"## dmuon-{program}")[1].split("\n## ")[0]
    source = (ROOT / "dmuon" / "tools" / "cli" / f"{program}.py").read_text()
    assert set(re.findall(r"`(--[\w-]+)", section)) == set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', source))


def strings() -> Iterator[str]:
    """Every string of the library; what is filled in is ``{}``."""
    for folder in ("dmuon", "solver", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


@pytest.mark.pitfall("P82")
def test_quoted_messages_are_those_of_the_code() -> None:
    said = list(strings())
    quoted = re.findall(r"^### `([^`]+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) > 60
    unsaid = []
    for message in quoted:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")), re.DOTALL)
        if not any(pattern.search(text) for text in said):
            unsaid.append(message)
    assert not unsaid
