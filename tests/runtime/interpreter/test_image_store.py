"""The images that a client uploads, and clients that break the rules of uploads."""

from __future__ import annotations

import hashlib
from traceback import walk_tb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.errors import AgentflowError, BadArgument, Overloaded
from agentflow.protocol import ops
from agentflow.protocol.chat import Conversation, Message
from agentflow.protocol.images import MAX_IMAGE_BYTES, Image, PlacedImage, image_file
from agentflow.runtime.interpreter.image_store import ImageStore
from agentflow.runtime.limits import MemoryBudget

FILES = [b"\x89PNG\r\n" + bytes([number]) * (8 + number) for number in range(3)]


def source_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def upload(store: ImageStore, op: ops.Upload) -> None:
    for _ in store.upload(op):
        pass


def used(store: ImageStore, source: str) -> Image:
    (image,) = store.find_images(ops.Image(1, source))
    return image


# A part without a place continues the upload; the largest one has all the rest.
parts = st.tuples(st.sampled_from(range(3)), st.none() | st.integers(0, 12), st.sampled_from([0, 1, 6, 20]))
commands = st.lists(
    st.one_of(
        st.tuples(st.just("part"), parts),
        st.tuples(st.just("release"), st.sampled_from(range(3))),
    ),
    min_size=10,
    max_size=30,
)


@given(commands)
def test_an_image_is_there_after_all_its_parts_in_order_and_until_its_release(given_commands) -> None:
    memory = MemoryBudget()
    store = ImageStore(memory)
    whole: set[int] = set()
    received: dict[int, int] = {}  # the bytes of unfinished uploads
    for kind, argument in given_commands:
        if kind == "release":
            store.release(source_of(FILES[argument]))
            whole.discard(argument)
            received.pop(argument, None)
            continue
        number, place, length = argument
        at = received.get(number, 0) if place is None else place
        data = FILES[number][at : at + length]
        upload(store, ops.Upload(source_of(FILES[number]), len(FILES[number]), at, data))
        if number in whole:
            continue
        if at and at != received.get(number, -1):
            received.pop(number, None)
        else:
            received[number] = at + len(data)
            if received[number] == len(FILES[number]):
                whole.add(number)
                del received[number]
    for number, data in enumerate(FILES):
        try:
            found = used(store, source_of(data)).data
        except AgentflowError:
            found = None
        assert found == (data if number in whole else None)
    assert memory.num_bytes == sum(len(FILES[number]) for number in [*whole, *received])
    store.close()
    assert memory.num_bytes == 0


def test_a_file_is_used_as_the_kind_that_it_was_uploaded_as() -> None:
    store = ImageStore(MemoryBudget())
    clip = b"\x00\x00\x00\x18ftypmp42 a clip"
    upload(store, ops.Upload(source_of(clip), len(clip), 0, clip, "video"))
    upload(store, ops.Upload(source_of(FILES[0]), len(FILES[0]), 0, FILES[0]))
    (file,) = store.find_images(ops.Video(1, source_of(clip)))
    assert (file.media_type, file.data) == ("video/mp4", clip)
    placed = (PlacedImage(0, Image(source_of(FILES[0]))), PlacedImage(0, Image(source_of(clip)), True, 4))
    message = Message("user", "", images=placed)
    assert len(store.find_images(ops.Converse(1, Conversation((message,))))) == 2
    for op in (ops.Image(1, source_of(clip)), ops.Video(1, source_of(FILES[0]))):
        with pytest.raises(BadArgument):
            store.find_images(op)
    upload(store, ops.Upload(source_of(b"no clip"), 7, 0, b"no clip", "video"))
    with pytest.raises(BadArgument):
        store.find_images(ops.Video(1, source_of(b"no clip")))


def test_an_image_counts_until_nothing_uses_it() -> None:
    memory = MemoryBudget()
    store, data = ImageStore(memory), FILES[0] + b"counted"
    upload(store, ops.Upload(source_of(data), len(data), 0, data))
    image = used(store, source_of(data))
    store.release(source_of(data))
    assert memory.num_bytes == len(data)
    del image
    assert memory.num_bytes == 0


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ops.Upload(source_of(FILES[0]), len(FILES[0]), 0, FILES[0][:-1] + b"x"), BadArgument),
        (ops.Upload(source_of(b"text"), 4, 0, b"text"), BadArgument),
        (ops.Upload(source_of(FILES[0]), MAX_IMAGE_BYTES + 1, 0, FILES[0]), BadArgument),
        (ops.Upload(source_of(FILES[0]), 3, 0, FILES[0]), BadArgument),
        (ops.Upload(source_of(FILES[0]), len(FILES[0]), -1, b""), BadArgument),
        (ops.Upload(source_of(FILES[0]), 2_000, 0, FILES[0]), Overloaded),
    ],
)
def test_a_wrong_upload_is_the_error_of_the_ops_that_use_it(op: ops.Upload, expected: type) -> None:
    memory = MemoryBudget(1_000)
    store = ImageStore(memory)
    upload(store, op)
    with pytest.raises(expected):
        used(store, op.source)
    assert memory.num_bytes == 0
    whole = FILES[0]  # and then it can be sent rightly
    upload(store, ops.Upload(source_of(whole), len(whole), 0, whole))
    assert used(store, source_of(whole)).data == whole


def test_the_first_error_of_an_upload_is_the_one_that_is_raised() -> None:
    store = ImageStore(MemoryBudget(10))
    first, rest = FILES[0][:4], FILES[0][4:]
    upload(store, ops.Upload(source_of(FILES[0]), len(FILES[0]), 0, first))
    upload(store, ops.Upload(source_of(FILES[0]), len(FILES[0]), 4, rest))
    with pytest.raises(Overloaded):
        used(store, source_of(FILES[0]))


def test_few_uploads_may_be_unfinished() -> None:
    memory = MemoryBudget()
    store = ImageStore(memory)
    for number in range(1_000):
        upload(store, ops.Upload(source_of(b"%d" % number), 1_000, 0, b"a"))
    assert memory.num_bytes <= 16_000


def test_the_bytes_in_a_conversation_are_the_uploaded_ones() -> None:
    store = ImageStore(MemoryBudget())
    upload(store, ops.Upload(source_of(FILES[1]), len(FILES[1]), 0, FILES[1]))
    claimed = Image(source_of(FILES[1]), "image/gif", b"other bytes")
    message = Message("user", "ab", images=(PlacedImage(1, claimed),))
    (image,) = store.find_images(ops.Converse(1, Conversation((message,))))
    assert (image.data, image.media_type) == (FILES[1], "image/png")


def test_the_error_of_an_upload_keeps_none_of_the_ops_that_used_the_image() -> None:
    store = ImageStore(MemoryBudget())
    upload(store, ops.Upload(source_of(b"text"), 4, 0, b"text"))
    num_frames: list[int] = []
    for _ in range(2):
        with pytest.raises(BadArgument) as caught:
            used(store, source_of(b"text"))
        num_frames.append(len([*walk_tb(caught.value.__traceback__)]))
    assert num_frames[0] == num_frames[1]


def test_the_bytes_of_an_image_are_in_no_text() -> None:
    assert "secret" not in repr(image_file(b"\x89PNG\r\n\x1a\nsecret"))
