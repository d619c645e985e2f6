"""Lets the tests in all folders here import ``kernel_cases``: the folder of a conftest is on the path."""

import pytest
from kernel_cases import IS_TRAPPED

# Products in float32 use no tiles: on the level below they compile to the same code.
FLOAT32 = (
    "float32",
    "test_masked_attention",
    "test_scores_of_any_size",
    "test_a_row_of_infinite_keys",
    "test_many_rows_over_one_prefix",
    "test_arrays_of_any_stride",
    "test_large_trees",
    "test_many_rows_use_experts",
)
# These tests repeat products of other tests, of whole models or with more blocks of keys.
REPEATED = ("embeddings_are_given", "test_tokens_are_those_of_the_logits", "2048-1500")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests of trapped instructions, which take long, as ``full`` where others show the same."""
    for item in items if IS_TRAPPED else ():
        if "native-amx" in item.name and any(name in item.nodeid for name in (*FLOAT32, *REPEATED)):
            item.add_marker(pytest.mark.full)
