"""Faults of one line each, put into a copy of the tree, and whether the tests that should notice them do.

    python tests/programs/mutations.py             # all of them, one after the other: some minutes
    python tests/programs/mutations.py merge_bytes prefetch
    python tests/programs/mutations.py --list

The tests run on a copy without a fault first, where they must pass. A fault whose line is not found exactly once in the
product is out of date; it counts as not noticed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("dmuon", "solver", "kernels")
INSTALLED_ELSEWHERE = ("solver", "kernels", "profiles")  # folders that are packages of dmuon
LIMIT_SECONDS = 900  # a hang is noticed too

UPDATE = "tests/kernels/test_update.py"
LIMITS = "tests/solver/test_limits.py"
BUFFER = "tests/layout/test_buffer.py"
REDISTRIBUTION = "tests/comm/test_redistribution.py"
PARITY = "tests/parity/test_parity.py"
RESUMED = "tests/parity/test_checkpoints.py -k goes_on_as"
EXCHANGED = "tests/exchanged/test_exchanged.py"
CLIP = "tests/optimizer/test_clip.py"
CLIP_ARGUMENTS = "tests/optimizer/test_clip_arguments.py"

# By what pytest is given to notice them, and by name: lines of the product, in which «old→new» marks the fault.
FAULTS = {
    "tests/kernels/interpreted_newton_schulz.py -k nearly_singular": {
        "v_transposed_after_a_restart": "beta=a, out=r, b_symmetric=«False→True»)",
    },
    "tests/kernels/test_newton_schulz.py": {
        "one_coefficient_twice": "(r, r, r, alpha=«c→b», beta=b, out=z)",
        "q_without_its_identity": "z.diagonal(dim1=-2, dim2=-1).add_(«a→0.0»)",
    },
    UPDATE: {
        "momentum_not_folded": "momentum.lerp_(update, «1 - beta→beta»)",
        "nesterov_ignored": "return «update.lerp_(momentum, beta) if nesterov else →»update.copy_(momentum)",
        "weight_decay_without_lr": "torch._foreach_mul_(params, 1 - «lr * →»weight_decay)",
        "scale_of_the_update_dropped": "torch._foreach_add_(params, updates, alpha=-lr« * scale→»)",
    },
    "tests/solver/test_planner.py": {
        "greedy_forgets_loads": "load[rank], owned[rank] = «finish→load[rank]», owned[rank] + rows * columns",
    },
    f"tests/solver/test_planner.py {LIMITS}": {
        "bound_too_high": "return needed * «_SLACK→1.2» <= float(self.power @ (capacity - self.problem.starts))",
    },
    "tests/solver/test_costs.py": {
        "transfer_counts_once_a_batch": "{k: cost + «k * →»extra for k, cost in costs[shape].items()}",
    },
    BUFFER: {
        "slots_are_not_aligned": "return «-(-size // align) * align→size»",
        "slots_overlap": "(parts[s][r][0]« + offset→», parts[s][r][0]« + offset→» + numel)",
    },
    f"{BUFFER} -k reproduce_every_matrix": {
        "gradients_summed": "average = dist.ReduceOp.«AVG→SUM»",
    },
    f"tests/layout/test_shards.py {REDISTRIBUTION}": {
        "pieces_in_order_of_ranks": "(places.items(), key=lambda item: «[runs[0][0] for runs in item[1].runs]→0»)",
    },
    REDISTRIBUTION: {
        "a_gather_is_not_waited_for": "«            self._pending.wait()\n→»            sections = self._received",
        "what_travels_is_the_wrong_part": "return tensor«→.flip(1)»[self.index]",
    },
    "tests/dedicated/test_ranks_that_differ.py -k evaluation_in_another_order": {
        "digests_are_alike": "return «zlib.crc32(repr(lanes).encode()) & DIGEST_BITS→len(lanes)»",
    },
    f"{PARITY} -k programs_equal_one_process": {
        "generation_not_raised": "runtime.generation += «1→0»",
        "an_accumulated_gradient_is_dropped": "local_tensor(before).«add_→copy_»(local)",
        "unused_gradients_are_zero": "zip(keys, flags, strict=True) «if flag→if True»",
    },
    "tests/dedicated/test_comm_options.py": {
        "prefetch": "islice(buffers, 1, «1 + self.comm.options.prefetch→2»)",
        "prefetch_of_a_step": "self._fill_budget = «self._comm.options.prefetch→1»",
        "outstanding_reductions": "while len(self._reductions) >= «_MAX_REDUCTIONS→1»:",
        "merge_bytes": "_nbytes(growing[dtype] + weights, dtype) > «comm.options.merge_bytes→0»:",
        "merge_bytes_of_one_block_only": "_nbytes(growing[dtype]« + weights→», dtype) > comm.options.merge_bytes:",
    },
    "tests/exchanged/test_bounds.py": {
        "chunk_bytes": "planned or unmeasured_batch((m, n)), «layouts.recipe.options.chunk_bytes // nbytes→2**60»)",
        "chunk_bytes_of_small_matrices": "«            room -= size\n→»",
        "cost_of_a_byte_is_nominal": '«if costs == "flops" else link_ns_per_byte(domain)→»',
        "cost_of_a_byte_ignored": "        if «→not »ns_per_byte:\n",
    },
    f"{EXCHANGED} -k a_step_is_one_vote": {
        "another_owner_than_planned": "result.append((start, start + count, «position→Position(0)»))",
    },
    f"{EXCHANGED} -k another_placement_is_planned_anew": {
        "a_stale_layout_is_kept": "if layouts != «self._laid_out→layouts»:",
    },
    RESUMED: {
        "loaded_momentum_is_not_stored": "row.local.«copy_(part)→zero_()»",
        "loaded_options_are_dropped": "value for name, value in saved.items() if name «not in→in» _OWN}",
    },
    "tests/optimizer/test_muon.py -k weight_decay": {
        "adamw_does_not_decay": 'weight_decay=«self.group["weight_decay"]→0.0»,',
    },
    f"{CLIP} {CLIP_ARGUMENTS} -k 'equals_a_single_process or plain_tensors'": {
        "gradients_grow_to_the_limit": "coefficient = «torch.clamp(→»limit / (total + 1e-6)«, max=1.0)→»",
    },
    f"{CLIP} -k equals_a_single_process": {
        "a_nan_of_another_rank_is_lost": "found = torch.where(both[len(terms) : -2] > «0→1», math.nan, found * sign)",
    },
    "tests/planning/test_cost_lookup.py -k another_devices": {
        "costs_of_another_device_fit": 'return replace(self, driver="", torch="", cuda=""«→, device=""», compilers="")',
    },
    "tests/planning/test_owner_plan.py": {
        "checksum_of_a_plan_is_not_checked": "if «checksum != stated→not stated»:",
        "digest_without_batches": "[self.solution.digest«, _named(self.chunks)→»])",
    },
    "tests/optimizer/test_record.py -k copies": {
        "copies_are_counted_twice": "copies = «elements / prod(shape)→1.0»",
        "recorded_update_without_learning_rate": "of_update« * factor**2→», of_weight",
    },
    "tests/report/test_matrix_tables.py": {
        "predictions_by_shape_alone": "{m.name: (plan.owners[m.name], «(m.rows, m.cols)→m.shape», m.pool)",
    },
    "tests/report/test_exchange_accounting.py": {
        "bytes_of_updates_forgotten": '(("gather", before), ("scatter", «after→0»))',
    },
}


@dataclass(frozen=True)
class Mutation:
    """``marked`` is a line of the product with its fault; ``tests`` are what pytest is given."""

    name: str
    marked: str
    tests: str

    @property
    def old(self) -> str:
        return re.sub("«(.*?)→(.*?)»", r"\1", self.marked, flags=re.DOTALL)

    @property
    def new(self) -> str:
        return re.sub("«(.*?)→(.*?)»", r"\2", self.marked, flags=re.DOTALL)

    def files(self, tree: Path) -> list[Path]:
        """The file that has the line, as often as it has it: once, unless the mutation is out of date."""
        paths = (path for folder in PRODUCT for path in sorted((tree / folder).rglob("*.py")) if not path.is_symlink())
        return [path for path in paths for _ in range(path.read_text().count(self.old))]


MUTATIONS = [Mutation(name, marked, tests) for tests, faults in FAULTS.items() for name, marked in faults.items()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutations; without: all of them")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    options = parser.parse_args(arguments)
    unknown = sorted({*options.names} - {mutation.name for mutation in MUTATIONS})
    if unknown:
        parser.error(f"no mutation is called {', '.join(unknown)}")
    chosen = [mutation for mutation in MUTATIONS if not options.names or mutation.name in options.names]
    if options.list:
        print("\n".join(mutation.name for mutation in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="dmuon-mutations-") as folder:
        tree = copied(Path(folder) / "tree")
        sound = cache(lambda tests: passes(tree, tests))
        noticed = [is_noticed(tree, mutation, sound) for mutation in chosen]
    print(f"{sum(noticed)} of {len(noticed)} faults were noticed")
    return 0 if all(noticed) else 1


def copied(tree: Path) -> Path:
    """All files that git knows or would add, where ``dmuon`` can be imported as it is installed."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        source, target = ROOT / name, tree / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    for name in INSTALLED_ELSEWHERE:
        (tree / "dmuon" / name).symlink_to(tree / name)
    return tree


def passes(tree: Path, tests: str) -> bool:
    """Whether the tests pass in ``tree``; there must be some."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *shlex.split(tests),
    ]
    folders = [tree, tree / "tests"]
    path = os.pathsep.join(map(str, folders))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    if "/interpreted_" in tests:
        environment["TRITON_INTERPRET"] = "1"
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    if ended.returncode not in (0, 1):  # no tests, or a wrong call: nothing was tried
        raise RuntimeError(f"pytest {tests} ended with code {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return ended.returncode == 0


def is_noticed(tree: Path, mutation: Mutation, sound: Callable[[str], bool]) -> bool:
    """Apply, run, take back, and print one line; ``sound`` tells whether tests pass without a fault."""
    start = time.monotonic()
    files = mutation.files(tree)
    if len(files) != 1:
        print(f"OUT OF DATE  {mutation.name}: its line is there {len(files)} times", flush=True)
        return False
    if not sound(mutation.tests):
        print(f"NOT TRIED    {mutation.name}: without it these tests fail too: {mutation.tests}", flush=True)
        return False
    text = files[0].read_text()
    files[0].write_text(text.replace(mutation.old, mutation.new))
    try:
        missed = passes(tree, mutation.tests)
    finally:
        files[0].write_text(text)
    print(
        f"{'NOT NOTICED' if missed else 'noticed    '}  {mutation.name} ({time.monotonic() - start:.0f} s)", flush=True
    )
    return not missed


if __name__ == "__main__":
    sys.exit(main())
