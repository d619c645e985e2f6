"""The free list: nothing is handed out twice, nothing is lost, double frees are caught."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.engine.cache.token_run import token_run
from agentflow.engine.request import CacheKey
from agentflow.engine.scheduling.kv_memory import KVMemory, KVSlots


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=60), st.randoms())
def test_slots_against_a_set(steps, random):
    slots = KVSlots(32)
    free, taken = set(range(32)), []
    for is_release, count in steps:
        if is_release:
            random.shuffle(taken)
            back, taken = taken[:count], taken[count:]
            slots.release(np.array(back, dtype=np.int32))
            free.update(back)
        elif count > len(free):
            with pytest.raises(MemoryError):
                slots.allocate(count)
        else:
            got = slots.allocate(count).tolist()
            assert free.issuperset(got)
            assert len(set(got)) == count
            free.difference_update(got)
            taken += got
        assert slots.num_free == len(free)


def test_slots_come_out_in_ascending_runs():
    slots = KVSlots(8)
    first = slots.allocate(4)
    assert first.tolist() == [0, 1, 2, 3]
    assert slots.allocate(2).tolist() == [4, 5]
    slots.release(first)
    assert slots.allocate(4).tolist() == [0, 1, 2, 3]


def test_double_release_is_refused():
    slots = KVSlots(4)
    slots.allocate(3)
    with pytest.raises(ValueError, match="already free"):
        slots.release(np.array([3], dtype=np.int32))


def test_a_slot_released_twice_at_once_is_found_by_the_check():
    slots = KVSlots(4)
    slots.allocate(3)
    slots.release(np.array([1, 1], dtype=np.int32))
    with pytest.raises(AssertionError, match="twice"):
        slots.check()


def test_a_cached_slot_that_is_free_is_found_by_the_check():
    """The counts agree, because another slot is lost."""
    memory = KVMemory(num_slots=4, max_context=4, max_running=1, use_cache=True)
    key, slots = CacheKey("", "", ""), memory.slots.allocate(3)
    run = token_run(np.array([5, 6], dtype=np.int32))
    memory.cache.extend(memory.cache.match(key, b""), key, run, slots[:2])
    memory.slots.release(slots[1:2])  # instead of the third
    with pytest.raises(AssertionError, match="a cached slot is free"):
        memory.check()
