"""The mutations are up to date; running them takes minutes and is left to the program."""

from __future__ import annotations

import re
import shlex

import pytest

from programs.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_line_of_a_mutation_is_in_the_product_once_and_its_tests_exist(mutation: Mutation) -> None:
    assert len(mutation.files(ROOT)) == 1 and mutation.old != mutation.new
    paths, _, words = mutation.tests.partition(" -k ")
    texts = [(ROOT / path).read_text() for path in paths.split()]
    for word in shlex.split(words)[0].split(" or ") if words else ():
        assert any(re.search(rf"^def test_\w*{word}", text, re.MULTILINE) for text in texts), word
