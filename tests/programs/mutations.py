"""Faults of one line each, put into a copy of the tree, and whether the tests that should notice them do.

    python tests/programs/mutations.py             # all of them, one after the other: some minutes
    python tests/programs/mutations.py merge_bytes prefetch
    python tests/programs/mutations.py --list

The tests run on a copy without a fault first, where they must pass. A fault whose line is not found exactly once in its
folder is out of date; it counts as not noticed.
"""

from __future__ import annotations

import argparse
import os
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
INSTALLED_ELSEWHERE = ("solver", "kernels", "profiles")  # folders that are packages of dmuon
LIMIT_SECONDS = 900  # a hang is noticed too


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new`` in the one file of ``folder`` that has it; ``tests`` are what pytest is given."""

    name: str
    folder: str
    old: str
    new: str
    tests: str


STEPS_DEDICATED = "tests/dedicated/test_topologies.py -k unusual_forwards_equal_single_process"
STEPS_EXCHANGED = "tests/exchanged/test_exchanged.py -k test_steps_equal_single_process"
STEPS_ALONE = "tests/kernels/test_update.py"
SHARDS = "tests/layout/test_shards.py"
OPTIONS = "tests/dedicated/test_comm_options.py"

MUTATIONS = (
    # -- kernels
    Mutation(
        "v_transposed_after_a_restart",
        "kernels",
        "beta=a, out=r, b_symmetric=not whole)",
        "beta=a, out=r, b_symmetric=True)",
        "tests/kernels/test_newton_schulz_triton.py",
    ),
    Mutation(
        "one_coefficient_twice",
        "kernels",
        "z = arithmetic.symmetric(r, r, r, alpha=c, beta=b, out=workspace.square())\n            x, spare",
        "z = arithmetic.symmetric(r, r, r, alpha=b, beta=b, out=workspace.square())\n            x, spare",
        "tests/kernels/test_newton_schulz.py",
    ),
    Mutation(
        "q_without_its_identity",
        "kernels",
        "z.diagonal(dim1=-2, dim2=-1).add_(a)",
        "z.diagonal(dim1=-2, dim2=-1).add_(0.0)",
        "tests/kernels/test_newton_schulz.py",
    ),
    Mutation(
        "momentum_not_folded",
        "kernels",
        "momentum.lerp_(update, 1 - beta)",
        "momentum.lerp_(update, beta)",
        STEPS_ALONE,
    ),
    Mutation(
        "nesterov_ignored",
        "kernels",
        "return update.lerp_(momentum, beta) if nesterov else update.copy_(momentum)",
        "return update.copy_(momentum)",
        STEPS_ALONE,
    ),
    Mutation(
        "weight_decay_without_lr",
        "kernels",
        "torch._foreach_mul_(weights, 1 - lr * weight_decay)",
        "torch._foreach_mul_(weights, 1 - weight_decay)",
        STEPS_ALONE,
    ),
    Mutation(
        "scale_of_the_update_dropped",
        "kernels",
        "torch._foreach_add_(weights, list(update.unbind(0)), alpha=-lr * scale)",
        "torch._foreach_add_(weights, list(update.unbind(0)), alpha=-lr)",
        STEPS_ALONE,
    ),
    # -- solver
    Mutation(
        "greedy_forgets_loads",
        "solver",
        "load[rank], owned[rank] = at, after",
        "load[rank], owned[rank] = load[rank], after",
        "tests/solver/test_heuristics.py tests/solver/test_planner.py",
    ),
    Mutation(
        "bound_too_high",
        "solver",
        "return needed * _SLACK <= self.power * capacity",
        "return needed * 1.2 <= self.power * capacity",
        "tests/solver/test_planner.py tests/solver/test_limits.py",
    ),
    Mutation(
        "limits_of_memory_ignored",
        "solver",
        "by_limits = (self.room[:, None, :] // self.weights[:, :, None]).min(axis=0)",
        "by_limits = (self.room[:, None, :] // self.weights[:, :, None]).max(axis=0)",
        "tests/solver/test_limits.py",
    ),
    Mutation(
        "transfer_counts_once_a_batch",
        "solver",
        "{k: cost + k * extra for k, cost in costs[shape].items()}",
        "{k: cost + extra for k, cost in costs[shape].items()}",
        "tests/solver/test_costs.py",
    ),
    # -- layout
    Mutation(
        "slots_are_not_aligned",
        "dmuon/layout",
        "return -(-size // align) * align",
        "return size",
        "tests/layout/test_buffer.py",
    ),
    Mutation(
        "slots_overlap",
        "dmuon/layout",
        "(parts[s][r][0] + offset, parts[s][r][0] + offset + numel)",
        "(parts[s][r][0], parts[s][r][0] + numel)",
        "tests/layout/test_buffer.py",
    ),
    Mutation(
        "pieces_in_order_of_ranks",
        "dmuon/layout",
        "return tuple(sorted(self.sources(owner), key=lambda i: [runs[0][0] for runs in self.pieces[i].runs]))",
        "return tuple(self.sources(owner))",
        f"{SHARDS} tests/comm/test_redistribution.py",
    ),
    # -- comm
    Mutation(
        "gradients_summed",
        "dmuon/comm",
        "average = dist.ReduceOp.AVG",
        "average = dist.ReduceOp.SUM",
        "tests/layout/test_buffer.py -k reproduce_every_matrix",
    ),
    Mutation(
        "a_gather_is_not_waited_for",
        "dmuon/comm",
        "        self._pending.wait()\n        arrived = {",
        "        arrived = {",
        "tests/comm/test_redistribution.py",
    ),
    Mutation(
        "digests_are_alike",
        "dmuon/comm",
        "return zlib.crc32(repr(lanes).encode()) & 0x7FFFFFFF",
        "return len(lanes)",
        "tests/dedicated/test_faults.py -k digests_do_not_depend",
    ),
    # -- dedicated
    Mutation(
        "generation_not_raised",
        "dmuon/dedicated",
        "        self.comm.publish_stream.join()\n        self.weights_changed()",
        "        self.comm.publish_stream.join()",
        STEPS_DEDICATED,
    ),
    Mutation(
        "an_accumulated_gradient_is_dropped",
        "dmuon/dedicated",
        "local_tensor(self.rest.grad).add_(local)",
        "local_tensor(self.rest.grad).copy_(local)",
        "tests/dedicated/test_runtime.py -k sequences_equal_single_process",
    ),
    Mutation(
        "prefetch",
        "dmuon/dedicated",
        "islice(buffers, 1, 1 + self.comm.options.prefetch)",
        "islice(buffers, 1, 2)",
        OPTIONS,
    ),
    Mutation(
        "prefetch_of_a_step",
        "dmuon/dedicated",
        "self._fill_budget = self.comm.options.prefetch",
        "self._fill_budget = 1",
        OPTIONS,
    ),
    Mutation(
        "outstanding_reductions",
        "dmuon/dedicated",
        "while len(self._reductions) >= self._comm.options.outstanding_reductions:",
        "while len(self._reductions) >= 2:",
        OPTIONS,
    ),
    Mutation(
        "merge_bytes",
        "dmuon/dedicated",
        "_nbytes(growing[dtype] + weights, dtype) > comm.options.merge_bytes:",
        "_nbytes(growing[dtype] + weights, dtype) > 0:",
        OPTIONS,
    ),
    Mutation(
        "merge_bytes_of_one_block_only",
        "dmuon/dedicated",
        "_nbytes(growing[dtype] + weights, dtype) > comm.options.merge_bytes:",
        "_nbytes(growing[dtype], dtype) > comm.options.merge_bytes:",
        OPTIONS,
    ),
    Mutation(
        "unused_gradients_are_zero",
        "dmuon/dedicated",
        "used = {key for key, flag in zip(keys, flags, strict=True) if flag}",
        "used = set(keys)",
        "tests/dedicated/test_runtime.py -k parameters_used_on_some_ranks_only",
    ),
    # -- exchanged and step
    Mutation(
        "chunk_bytes",
        "dmuon/exchanged",
        "size = min(planned or unplanned_batch_size((m, n)), layouts.recipe.options.chunk_bytes // nbytes)",
        "size = planned or unplanned_batch_size((m, n))",
        "tests/exchanged/test_bounds.py",
    ),
    Mutation(
        "chunk_bytes_of_small_matrices",
        "dmuon/step",
        "            room -= size\n",
        "",
        "tests/exchanged/test_bounds.py",
    ),
    Mutation(
        "cost_of_a_byte_is_nominal",
        "dmuon/exchanged",
        'if options.costs == "flops" else link_ns_per_byte(domain)',
        "",
        "tests/exchanged/test_bounds.py",
    ),
    Mutation(
        "cost_of_a_byte_ignored",
        "dmuon/planning",
        "                if ns_per_byte:\n",
        "                if not ns_per_byte:\n",
        "tests/exchanged/test_bounds.py",
    ),
    Mutation(
        "another_owner_than_planned",
        "dmuon/exchanged",
        "Parcel(1, placed.layout, positions(len(placed.ranks)), position_in(placed.ranks, owner))",
        "Parcel(1, placed.layout, positions(len(placed.ranks)), positions(1)[0])",
        "tests/exchanged/test_exchanged.py -k a_step_is_one_vote",
    ),
    Mutation(
        "a_stale_layout_is_kept",
        "dmuon/exchanged",
        "changed = changed or any(_lies(p) != laid for p, laid in zip(self.params, self._laid, strict=True))",
        "changed = bool(changed)",
        "tests/exchanged/test_exchanged.py -k another_placement_is_planned_anew",
    ),
    Mutation(
        "what_travels_is_the_wrong_part",
        "dmuon/comm",
        "view: Tensor = tensor[_each(blocks[0][1])]",
        "view: Tensor = tensor.flip(1)[_each(blocks[0][1])]",
        "tests/comm/test_redistribution.py",
    ),
    # -- optimizer
    Mutation(
        "loaded_momentum_is_not_stored",
        "dmuon/optimizer",
        "self.local.copy_(self.residency.part_of(self.param, value, self.name))",
        "self.local.zero_()",
        "tests/dedicated/test_checkpoint.py -k resume",
    ),
    Mutation(
        "loaded_options_are_dropped",
        "dmuon/optimizer",
        'return {**{name: value for name, value in group.items() if name != "params"}, **saved}',
        'return {**saved, **{name: value for name, value in group.items() if name != "params"}}',
        "tests/dedicated/test_checkpoint.py tests/exchanged/test_exchanged_checkpoint.py",
    ),
    Mutation(
        "adamw_does_not_decay",
        "dmuon/step",
        "            weight_decay=weight_decay,\n            eps=eps,",
        "            weight_decay=0.0,\n            eps=eps,",
        "tests/optimizer/test_muon.py -k 'weight_decay or each_option'",
    ),
    Mutation(
        "gradients_grow_to_the_limit",
        "dmuon/optimizer",
        "coefficient = torch.clamp(limit / (total + 1e-6), max=1.0)",
        "coefficient = limit / (total + 1e-6)",
        "tests/optimizer/test_clip.py -k 'norms_and_clipped_gradients or plain_tensors'",
    ),
    Mutation(
        "a_nan_of_another_rank_is_lost",
        "dmuon/optimizer",
        "keys = bits if order > 0 else torch.where(terms.isnan(), _LARGEST, -bits)",
        "keys = bits if order > 0 else -bits",
        "tests/optimizer/test_clip.py -k nonfinite",
    ),
    # -- planning
    Mutation(
        "costs_of_another_device_fit",
        "dmuon/planning",
        'return replace(self, driver="", torch="", cuda="")',
        'return replace(self, driver="", torch="", cuda="", device="")',
        "tests/planning/test_cost_cache.py",
    ),
    Mutation(
        "checksum_of_a_plan_is_not_checked",
        "dmuon/planning",
        "if checksum != document[_CHECKSUM]:",
        "if not document[_CHECKSUM]:",
        "tests/planning/test_owner_plan.py",
    ),
    Mutation(
        "digest_without_batches",
        "dmuon/planning",
        "return _sha256([self.solution.digest, _named(self.chunks), self._named_variants()])",
        "return _sha256([self.solution.digest, self._named_variants()])",
        "tests/planning/test_owner_plan.py",
    ),
)


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
    folders = [tree, *(folder for folder in (tree / "tests").iterdir() if folder.is_dir())]  # tests import tests
    path = os.pathsep.join(map(str, folders))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
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
    files = [file for file in sorted((tree / mutation.folder).glob("*.py")) if mutation.old in file.read_text()]
    count = sum(file.read_text().count(mutation.old) for file in files)
    if count != 1:
        print(f"OUT OF DATE  {mutation.name}: its line is {count} times in {mutation.folder}", flush=True)
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
