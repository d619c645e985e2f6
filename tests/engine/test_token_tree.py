"""The tree of choices against one written down as nested dictionaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param

from agentflow.engine.token_tree import MAX_CHOICE_TOKENS, TokenTree, token_tree
from agentflow.errors import BadArgument

choices_to_score = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=6) | st.just([0, 0, 0, 0, 0, 0, 0, 0, 1]),
    min_size=1,
    max_size=12,
)


def ways(choices: list[list[int]]) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """All beginnings of the choices, and the beginnings that a choice continues."""
    all_ways = {tuple(choice[:n]) for choice in choices for n in range(1, len(choice) + 1)}
    return all_ways, {way[:-1] for way in all_ways if len(way) > 1}


def way_to(tree: TokenTree, node: int) -> tuple[int, ...]:
    found = []
    while node >= 0:
        found.append(int(tree.token_ids[node]))
        node = int(tree.parents[node])
    return tuple(reversed(found))


@given(choices_to_score)
def test_each_beginning_is_there_once(choices):
    tree = token_tree(choices)
    all_ways, inner = ways(choices)
    nodes = [way_to(tree, node) for node in range(tree.num_nodes)]
    assert set(nodes) == inner
    assert len(nodes) == len(inner)
    assert tree.depths.tolist() == [len(way) - 1 for way in nodes]
    assert tree.depths.tolist() == sorted(tree.depths.tolist())  # breadth first
    assert all(tree.parents[node] < node for node in range(tree.num_nodes))
    rows = [(), *nodes]
    targets = [
        (*way, int(token))
        for row, way in enumerate(rows)
        for token in tree.targets[tree.first_targets[row] : tree.first_targets[row + 1]]
    ]
    assert len(targets) == len(all_ways) == len(tree.targets)
    assert set(targets) == all_ways
    assert [[targets[t] for t in choice] for choice in tree.choice_targets] == [
        [tuple(choice[: n + 1]) for n in range(len(choice))] for choice in choices
    ]
    assert tree.longest == max(map(len, choices))
    values = [-float(number) for number in range(len(targets))]
    assert tree.by_choice(values) == [[values[t] for t in choice] for choice in tree.choice_targets]


@given(choices_to_score, st.data())
def test_the_way_to_each_node_begins_at_the_top(choices, data):
    tree = token_tree(choices)
    if not tree.num_nodes:
        return
    first = data.draw(st.integers(0, tree.num_nodes - 1))
    end = data.draw(st.integers(first + 1, tree.num_nodes))
    paths = tree.paths(first, end)
    assert paths.shape == (end - first, int(tree.depths[first:end].max()) + 1)
    for node, path in zip(range(first, end), paths.tolist(), strict=True):
        size = int(tree.depths[node]) + 1
        assert path[size:] == [node] * (len(path) - size)
        assert [int(tree.token_ids[n]) for n in path[:size]] == list(way_to(tree, node))


@pytest.mark.parametrize("choices", [[], [[]], [[1], []]])
def test_a_choice_without_a_token_is_refused(choices):
    with pytest.raises(BadArgument, check=has_param("choices")):
        token_tree(choices)


def test_more_tokens_than_can_be_scored_at_once_are_refused():
    tree = token_tree([[7] * MAX_CHOICE_TOKENS])
    assert tree.num_nodes == MAX_CHOICE_TOKENS - 1
    with pytest.raises(BadArgument, match=r"65537.*65536"):
        token_tree([[7], [7] * MAX_CHOICE_TOKENS])


heads_with_choices = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=5), choices_to_score), min_size=1, max_size=6
)


@given(heads_with_choices)
def test_choices_after_heads_have_the_targets_of_choices_that_begin_with_them(questions):
    heads = [head for head, _ in questions]
    choices = [choice for _, group in questions for choice in group]
    head_of = [number for number, (_, group) in enumerate(questions) for _ in group]
    tree = token_tree(choices, heads, head_of)
    rows = [(), *[way_to(tree, node) for node in range(tree.num_nodes)]]
    assert tree.depths.tolist() == [len(way) - 1 for way in rows[1:]]
    assert all(tree.parents[node] < node for node in range(tree.num_nodes))
    targets = []
    for row, way in enumerate(rows):
        wanted = tree.targets[tree.first_targets[row] : tree.first_targets[row + 1]].tolist()
        targets += [(*way, token) for token in wanted]
        assert (row in tree.scored_rows) == bool(wanted)
    assert len(targets) == len(tree.targets)
    for choice, number, found in zip(choices, head_of, tree.choice_targets, strict=True):
        head = tuple(heads[number])
        assert [targets[t] for t in found] == [(*head, *choice[: n + 1]) for n in range(len(choice))]
    assert tree.longest == max(
        len(heads[n]) + len(choice) for choice, n in zip(choices, head_of, strict=True)
    )
    distinct = {
        (*heads[n], *choice)[:end] for n, choice in zip(head_of, choices, strict=True) for end in range(99)
    }
    assert tree.num_nodes <= sum(map(len, heads)) + len(distinct)  # only a head may repeat another's choice
