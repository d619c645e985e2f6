"""The store of responses against a list that is searched from one end to the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentflow.protocol.chat import Message
from agentflow.server.responses.item import Item
from agentflow.server.responses.store import ResponseStore, StoredConversation, StoredRecord, StoredResponse

MOST_BYTES, LIFETIME_S = 20_000, 10.0
TENANTS = ("a", "b", "c")

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(TENANTS), st.integers(0, 3_000)),
        st.tuples(st.just("converse"), st.sampled_from(TENANTS), st.integers(0, 1_500)),
        st.tuples(st.just("delete"), st.sampled_from(TENANTS), st.integers(0, 40)),
        st.tuples(st.just("wait"), st.just(""), st.integers(1, 6)),
    ),
    max_size=40,
)


def item(item_id: str, size: int = 0) -> Item:
    return Item.made(item_id, {"id": item_id, "text": "x" * size}, Message("user", "x" * size))


def response(number: int, size: int) -> StoredResponse:
    return StoredResponse(
        f"resp_{number}", b"x" * size, None, (item(f"in_{number}"),), (item(f"msg_{number}"),)
    )


def conversation(number: int, size: int) -> StoredConversation:
    """The next version of one of a tenant's two conversations, with the items of the response before it."""
    items = (item(f"msg_{number - 1}"), item(f"own_{number}", size))
    return StoredConversation(f"conv_{number % 2}", 0, {}, items, (), sum(one.num_bytes for one in items))


def is_there(store: ResponseStore, one: tuple[float, str, StoredRecord]) -> bool:
    _, tenant, stored = one
    return stored in (store.find(tenant, stored.id), store.find_conversation(tenant, stored.id))


@given(steps=steps)
def test_the_store_keeps_the_entries_of_a_list(steps: list[tuple[str, str, int]]) -> None:
    now_s = 0.0
    store = ResponseStore(MOST_BYTES, LIFETIME_S, clock=lambda: now_s)
    kept: list[tuple[float, str, StoredRecord]] = []

    def used(tenant: str) -> int:
        return sum(one.num_bytes for _, owner, one in kept if owner == tenant)

    for number, (what, tenant, value) in enumerate(steps):
        match what:
            case "add" | "converse":
                added: StoredRecord = (response if what == "add" else conversation)(number, value)
                assert store.add(tenant, added)
                kept = [one for one in kept if one[0] > now_s and (one[1], one[2].id) != (tenant, added.id)]
                kept.append((now_s + LIFETIME_S, tenant, added))
                while sum(map(used, TENANTS)) > MOST_BYTES:
                    most = max(used(one) for one in TENANTS)
                    # Among equals, any; the test does not repeat which.
                    largest = {one for one in TENANTS if used(one) == most}
                    gone = [one for one in kept if one[1] in largest and not is_there(store, one)]
                    assert gone
                    assert gone[0] == next(one for one in kept if one[1] == gone[0][1])
                    kept.remove(gone[0])
            case "delete":
                had = any(
                    one[1] == tenant and one[2].id == f"resp_{value}" and one[0] > now_s for one in kept
                )
                assert store.delete(tenant, f"resp_{value}") == had
                kept = [one for one in kept if (one[1], one[2].id) != (tenant, f"resp_{value}")]
            case _:
                now_s += value
        kept = [one for one in kept if one[0] > now_s]
        for other in TENANTS:
            for index in range(number + 1):
                found = store.find(other, f"resp_{index}")
                mine = [one[2] for one in kept if one[1] == other and one[2].id == f"resp_{index}"]
                assert [found] == (mine or [None])
                for item_id in (f"msg_{index}", f"in_{index}", f"own_{index}"):
                    items = [made.id for one in kept if one[1] == other for made in one[2].items]
                    assert (store.find_item(other, item_id) is not None) == (item_id in items)
        assert store.num_bytes == sum(map(used, TENANTS)) <= MOST_BYTES
