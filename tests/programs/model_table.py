"""Which models and frameworks train, by running the tests of each: ``python tests/programs/model_table.py [WORD …]``.

Prints a row for each, what is expected of it and what came of it. Words choose rows that contain one of them. Ends with
1 unless each row is green: its tests passed, and none was skipped because a framework is not installed.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
TRAINS, REMEDY = "trains", "refused, and its remedy trains"
_FAMILIES = "model/test_transformers_families.py::"
_TRAINING = "optimizer/test_transformers_training.py::test_two_ranks_train_what_one_process_does"


@dataclass(frozen=True)
class Row:
    """A model, or a framework in one setting.

    Attributes:
        tests: what shows it, from the folder of tests; without brackets all cases are meant.
    """

    what: str
    expected: str
    tests: tuple[str, ...]


def _parts(*keys: str) -> tuple[str, ...]:
    return tuple(f"{_FAMILIES}test_parts_are_what_a_forward_keeps_apart[{key}]" for key in keys)


_DENSE = f"{_FAMILIES}test_layers_of_dense_families_are_on_muon_and_all_else_on_adamw"
_TRAINER, _ACCELERATE = "frameworks/test_trainer.py::test_", "frameworks/test_accelerate.py::test_"
_LIGHTNING = "frameworks/test_lightning.py::test_training_equals_one_process_and_resumes_exactly"
_TITAN, _PEFT = "frameworks/test_torchtitan.py::test_", "frameworks/test_peft.py::test_"
_SPLITS, _NANOGPT = "optimizer/test_known_splits.py::test_", "optimizer/test_nanogpt.py::test_"
_REFUSED = "frameworks/test_refused_models.py::test_"

ROWS = (
    Row("Llama, Mistral, Qwen2/3, BERT, T5, ViT, CLIP, DINOv2, Whisper", TRAINS, (_DENSE, *_parts("llama", "bert"))),
    Row("Mixtral, Qwen3-MoE, Llama4: experts", TRAINS, _parts("mixtral", "qwen3_moe", "llama4_text")),
    Row(
        "gpt-oss, DeepSeek-V3, Qwen3-Next on two ranks",
        TRAINS,
        tuple(
            f"{_TRAINING}[{key}-{residency}]"
            for key in ("gpt_oss", "deepseek_v3", "qwen3_next")
            for residency in ("dedicated", "exchanged")
        ),
    ),
    Row(
        "GPT-2, Falcon on two ranks",
        TRAINS,
        tuple(
            f"{_TRAINING}[{key}-{residency}]"
            for key in ("gpt2", "falcon#new")
            for residency in ("dedicated", "exchanged")
        ),
    ),
    Row("GPT-NeoX, BLOOM, Phi-3, ModernBERT", TRAINS, _parts("gpt_neox", "bloom", "phi3", "modernbert")),
    Row("Mamba, Mamba2, Bamba, Falcon-H1", TRAINS, _parts("mamba", "mamba2", "bamba", "falcon_h1")),
    Row(
        "every other family of transformers",
        TRAINS,
        (f"{_FAMILIES}test_nothing_of_any_family_looks_fused_and_is_unknown",),
    ),
    Row(
        "plans from configurations",
        TRAINS,
        (f"{_FAMILIES}test_a_plan_from_a_configuration_has_just_the_matrices_that_dedication_owns",),
    ),
    Row(
        "fused tensors as parameters or groups",
        TRAINS,
        (f"{_SPLITS}each_matrix_of_a_fused_tensor_is_updated_on_its_own",),
    ),
    Row("unknown fused tensors", REMEDY, (f"{_SPLITS}what_only_looks_fused_is_refused_however_it_comes",)),
    Row(
        "ResNet and other convolutional networks",
        TRAINS,
        (
            "optimizer/test_convnets.py::test_one_process_equals_torch_on_convolutional_networks",
            "optimizer/test_convnets.py::test_convolutional_networks_on_ranks_equal_a_single_process",
        ),
    ),
    Row(
        "layers that are attributes, flat Sequentials",
        TRAINS,
        (
            "optimizer/test_models_without_stacks.py::test_one_process_equals_torch_on_models_without_stacks",
            "optimizer/test_models_without_stacks.py::test_dedicated_models_without_stacks_equal_a_single_process",
        ),
    ),
    Row("Zamba: layers shared by blocks", REMEDY, (f"{_REFUSED}shared_layers_train_dedicated_by_each_remedy",)),
    Row(
        "EnCodec: weight norm",
        REMEDY,
        (f"{_REFUSED}weights_that_are_all_normalized_train_without_their_parametrizations_or_by_adamw",),
    ),
    Row(
        "explain, of groups of one's own",
        TRAINS,
        ("report/test_explain.py::test_groups_of_ones_own_are_told_as_they_are",),
    ),
    Row(
        "Trainer, DDP",
        TRAINS,
        (
            f"{_TRAINER}training_equals_one_process_and_each_matrix_has_one_owner",
            f"{_TRAINER}run_under_bf16_autocast_resumes_with_the_same_bits[ddp]",
        ),
    ),
    Row(
        "Trainer, FSDP2, full and sharded checkpoints",
        TRAINS,
        tuple(
            f"{_TRAINER}run_under_bf16_autocast_resumes_with_the_same_bits[{kind}_STATE_DICT]"
            for kind in ("FULL", "SHARDED")
        ),
    ),
    Row("Trainer, dedicated", TRAINS, (f"{_TRAINER}dedicated_model_trains_saves_and_resumes",)),
    Row(
        "Trainer that does not fit a dedicated model",
        REMEDY,
        (f"{_TRAINER}trainers_that_do_not_fit_are_refused_with_the_one_that_does",),
    ),
    Row("accelerate, DDP and FSDP2", TRAINS, (f"{_ACCELERATE}training_equals_one_process_and_resumes_exactly",)),
    Row(
        "accelerate, dedicated",
        TRAINS,
        (f"{_ACCELERATE}dedicated_model_trains_and_its_files_are_those_of_one_process",),
    ),
    Row(
        "accelerate that does not fit a dedicated model",
        REMEDY,
        (f"{_ACCELERATE}accelerators_that_do_not_fit_are_refused_with_the_one_that_does",),
    ),
    Row("torch's clipping of any mix", TRAINS, ("optimizer/test_clip.py::test_torch_functions_equal_single_process",)),
    Row("Lightning, DDP", TRAINS, (f"{_LIGHTNING}[ddp-True]",)),
    Row("Lightning, FSDP2", TRAINS, (f"{_LIGHTNING}[fsdp2-False]",)),
    Row(
        "Lightning, dedicated",
        TRAINS,
        tuple(f"{_LIGHTNING}[{kind}]" for kind in ("dedicated-False", "dedicated-True", "dedicated alone-False")),
    ),
    Row(
        "torchtitan, its Llama and its checkpointer, meta device",
        TRAINS,
        (
            f"{_TITAN}training_equals_one_process_and_resumes_exactly",
            f"{_TITAN}its_llama_trains_as_in_one_process_with_its_fused_projection_split",
        ),
    ),
    Row(
        "peft: LoRA",
        TRAINS,
        (
            f"{_PEFT}adapters_train_save_and_merge_under_ddp",
            f"{_PEFT}adapters_of_a_dedicated_model_train_save_and_merge",
        ),
    ),
    Row(
        "save_pretrained, safetensors, torch.save of a dedicated model",
        REMEDY,
        (
            "frameworks/test_saving.py::test_model_is_saved_whole_or_not_at_all",
            "frameworks/test_saving.py::test_adapters_are_saved_whole_or_not_at_all",
        ),
    ),
    Row("TRL's SFTTrainer", TRAINS, ("frameworks/test_trl.py::test_fine_tuning_equals_one_process",)),
    Row(
        "a model that is moved or converted after its optimizer was built",
        TRAINS,
        (
            "optimizer/test_state_life.py::test_a_model_that_is_converted_after_the_optimizer_was_built_trains_as_one_before",
            "optimizer/test_state_life.py::test_parameters_that_are_replaced_are_followed",
        ),
    ),
    Row("frozen parameters", TRAINS, ("optimizer/test_state_life.py::test_what_is_frozen_costs_no_state",)),
    Row(
        "DDP and fully_shard in any order",
        TRAINS,
        ("exchanged/test_late_wrapping.py::test_each_matrix_has_one_owner_in_any_order",),
    ),
    Row(
        "GradScaler",
        TRAINS,
        ("optimizer/test_grad_scaler.py::test_scaled_training_equals_single_process_and_all_ranks_skip_together",),
    ),
    Row(
        "averages of weights",
        TRAINS,
        ("optimizer/test_moving_average.py::test_averages_equal_those_of_one_process_and_training_goes_on",),
    ),
    Row(
        "norms that a program logs",
        TRAINS,
        ("dedicated/test_owned_norm.py::test_norms_that_a_program_logs_are_those_of_one_process",),
    ),
    Row(
        "nanoGPT's model and loop",
        TRAINS,
        (
            f"{_NANOGPT}its_fused_projection_is_cut_and_embeddings_are_told",
            f"{_NANOGPT}its_loop_under_ddp_equals_one_process",
        ),
    ),
    Row("nanoGPT's groups", REMEDY, (f"{_NANOGPT}its_groups_are_refused_with_the_line_that_sorts_them",)),
    Row(
        "OneCycleLR and other schedulers",
        TRAINS,
        ("optimizer/test_schedulers.py::test_each_scheduler_drives_both_routes_as_it_drives_torchs",),
    ),
    Row(
        "torch.compile",
        TRAINS,
        (
            "optimizer/test_models_without_stacks.py::test_an_optimizer_may_be_given_the_compiled_form_of_a_dedicated_model",
        ),
    ),
    Row(
        "a module around a dedicated model",
        TRAINS,
        ("optimizer/test_outer_modules.py::test_training_equals_one_process",),
    ),
)


def chosen(words: Sequence[str]) -> list[Row]:
    return [row for row in ROWS if not words or any(word.lower() in row.what.lower() for word in words)]


def result(row: Row, outcomes: dict[str, str]) -> str:
    """What came of a row, by the outcome of each test that ran, by its name."""
    found: list[str] = []
    for test in row.tests:
        of_test = [outcome for name, outcome in outcomes.items() if name == test or name.startswith(f"{test}[")]
        found += of_test or ["missing"]
    for outcome in ("failed", "missing", "skipped"):
        if outcome in found:
            return f"{outcome.upper()}: {found.count(outcome)} of {len(found)}"
    return row.expected


class Outcomes:
    """By name of a test; as a plugin of pytest."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.removeprefix("tests/")
        if report.when == "call" or report.outcome != "passed":
            self.of[name] = "failed" if "failed" in (report.outcome, self.of.get(name)) else report.outcome

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "skipped":  # a framework is not installed
            self.of |= {test: "skipped" for row in ROWS for test in row.tests if test.startswith(_file(report.nodeid))}


def _file(nodeid: str) -> str:
    return f"{nodeid.removeprefix('tests/')}::"


def run(rows: Iterable[Row]) -> tuple[dict[str, str], str]:
    """Outcomes of the tests of ``rows``, and what pytest printed."""
    tests = dict.fromkeys(str(TESTS / test) for row in rows for test in row.tests)
    outcomes, printed = Outcomes(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        pytest.main(["-q", "-m", "slow or not slow", "-p", "no:cacheprovider", *tests], plugins=[outcomes])
    return outcomes.of, printed.getvalue()


def main() -> int:
    rows = chosen(sys.argv[1:])
    outcomes, printed = run(rows) if rows else ({}, "")
    results = [result(row, outcomes) for row in rows]
    if any(found != row.expected for row, found in zip(rows, results, strict=True)):
        print(printed)
    width = max((len(row.what) for row in rows), default=0)
    for row, found in zip(rows, results, strict=True):
        print(f"{row.what:{width}}  expected: {row.expected:32}  result: {found}")
    green = sum(found == row.expected for row, found in zip(rows, results, strict=True))
    print(f"{green} of {len(rows)} rows are green")
    return 0 if rows and green == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
