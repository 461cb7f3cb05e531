"""What makes a measured cost valid: the digest of the code that was timed, and the keys of shipped profiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dmuon.planning import cost_cache as device_keys

RULE = '''"""How fast it goes."""

import math

from .limits import most

__all__ = ["speed"]

_FACTOR = 2.5  # measured


def speed(x: float, y: float = 1.0) -> float:
    """Of ``x``, at most ``most()``."""
    # The smaller one.
    return min(_FACTOR * math.sqrt(x) + y, most())
'''
LIMITS = '''"""How fast it may go."""

from __future__ import annotations


def most() -> float:
    return 3.0
'''
KERNELS = Path(__file__).parents[2] / "kernels"


def digest(rule: str = RULE, limits: str = LIMITS) -> str:
    return device_keys.code_digest([rule, limits])


def changed(old: str, new: str) -> str:
    assert old in RULE
    return RULE.replace(old, new)


@pytest.mark.pitfall("P81")
@pytest.mark.parametrize(
    "rule",
    [
        changed('"""How fast it goes."""', '"""Speed."""'),
        changed("    # The smaller one.\n", ""),
        changed("from .limits import most", "from .bounds import most"),
        changed("import math\n\nfrom .limits import most", "from .limits import most\n\nimport math"),
        changed("x: float, y: float = 1.0)", "\n    x: float,\n    y: float = 1.0,\n)"),
    ],
)
def test_words_layout_and_names_of_files_leave_the_digest(rule: str) -> None:
    assert digest(rule) == digest()


@pytest.mark.pitfall("P81")
@pytest.mark.parametrize(
    "rule",
    [
        changed("2.5", "2.25"),
        changed("_FACTOR * math.sqrt(x) + y", "_FACTOR * (math.sqrt(x) + y)"),
        changed("import math\n", "import cmath as math\n"),
        changed("def speed", "@cache\ndef speed"),
    ],
)
def test_what_is_computed_changes_the_digest(rule: str) -> None:
    assert digest(rule) != digest()
    assert digest(limits=LIMITS.replace("3.0", "4.0")) != digest()


@pytest.mark.pitfall("P81")
def test_the_key_holds_the_digest_of_the_kernels() -> None:
    sources = [path.read_text(encoding="utf-8") for path in KERNELS.glob("*.py")]
    assert len(sources) > 10
    key = device_keys.device_key(torch.device("cpu"), device_keys.NsOptions())
    assert key.kernels == device_keys.code_digest(sources)
    assert key.threads == torch.get_num_threads()


def profiles() -> list[tuple[str, device_keys.CacheKey]]:
    files = sorted((KERNELS.parent / "profiles").glob("*.json"))
    return [(path.name, device_keys.CacheKey(**json.loads(path.read_bytes())["key"])) for path in files]


@pytest.mark.pitfall("P81")
@pytest.mark.parametrize(("name", "recorded"), profiles())
def test_a_shipped_profile_was_measured_with_todays_kernels(name: str, recorded: device_keys.CacheKey) -> None:
    key = device_keys.device_key(torch.device("cpu"), device_keys.NsOptions())
    for field in ("kernels", "dtype", "coefficients", "steps"):
        assert getattr(recorded, field) == getattr(key, field), f"{name}: measure anew with dmuon-profile"
