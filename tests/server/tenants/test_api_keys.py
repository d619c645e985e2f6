"""Keys, their tenants, and the keys file: accepted ones, and the errors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clocks import ClockNs
from support.counted_lines import counted_lines

from agentflow.engine.tenant import ANONYMOUS, Tenant
from agentflow.errors import BadArgument, NotAuthorized
from agentflow.server.tenants.keys import (
    DEFAULT_TENANT,
    Tenants,
    hashed_key,
    key_of_header,
    new_key,
    read_keys_file,
)
from agentflow.server.tenants.rate_limit import TenantGate

ANN, BOB = "af-ann", "af-bob"
WHOLE = f"""
[tenants.ann]
keys = ["{hashed_key(ANN)}", "{hashed_key("af-second")}"]
weight = 2
requests_per_minute = 600
tokens_per_minute = 100_000
max_unfinished = 64
models = ["smollm2-135m"]
sees_metrics = true

[tenants."bob & co"]
keys = ["{hashed_key(BOB)}"]
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "keys.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_new_key_has_256_random_bits_and_is_found_by_its_hash(tmp_path: Path) -> None:
    made = [new_key() for _ in range(100)]
    assert len({key for key, _ in made}) == 100
    for key, hashed in made:
        assert key.startswith("af-")
        assert len(key) == len("af-") + 43  # 256 bits, 6 in each character
        assert hashed == "sha256:" + hashlib.sha256(key.encode()).hexdigest()
    key, hashed = made[0]
    tenants = Tenants(file=written(tmp_path, f'[tenants.ann]\nkeys = ["{hashed}"]'))
    assert tenants.of(key) == Tenant("ann")


def test_without_keys_everybody_is_the_same_tenant() -> None:
    tenants = Tenants()
    assert not tenants.need_keys
    assert tenants.of(None) is tenants.of("anything") is ANONYMOUS
    assert list(tenants) == [ANONYMOUS]
    assert tenants.current(ANONYMOUS) is ANONYMOUS


def test_keys_of_the_command_line_name_one_tenant_that_sees_the_metrics() -> None:
    tenants = Tenants([ANN, BOB])
    assert tenants.need_keys
    assert tenants.of(ANN) is tenants.of(BOB) is DEFAULT_TENANT
    assert DEFAULT_TENANT.sees_metrics
    assert list(tenants) == [DEFAULT_TENANT]


def test_the_file_sets_the_limits_of_tenants(tmp_path: Path) -> None:
    tenants = Tenants(file=written(tmp_path, WHOLE))
    ann = Tenant("ann", 2.0, 600, 100_000, 64, ("smollm2-135m",), True)
    assert tenants.of(ANN) == tenants.of("af-second") == ann
    assert isinstance(ann.weight, float)
    assert tenants.of(BOB) == Tenant("bob & co")
    assert list(tenants) == [ann, Tenant("bob & co")]
    assert tenants.of(ANN).may_use("smollm2-135m")
    assert not tenants.of(ANN).may_use("other")
    assert tenants.of(BOB).may_use("other")


def test_both_ways_hold_side_by_side(tmp_path: Path) -> None:
    tenants = Tenants(["af-mine"], written(tmp_path, WHOLE))
    assert [tenant.name for tenant in tenants] == ["default", "ann", "bob & co"]
    assert tenants.of("af-mine") is DEFAULT_TENANT
    assert tenants.of(ANN).name == "ann"


def test_a_missing_key_and_a_wrong_one_are_distinguished() -> None:
    tenants = Tenants([ANN])
    with pytest.raises(NotAuthorized):
        tenants.of(None)
    for wrong in ("", ANN + "x", ANN[:-1], hashed_key(ANN), "ä", "\udcff", "\x00"):
        with pytest.raises(NotAuthorized) as caught:
            tenants.of(wrong)
        assert not wrong or wrong not in str(caught.value)


@given(given_keys=st.lists(st.text(), max_size=8))
def test_only_the_keys_themselves_are_let_in(given_keys: list[str]) -> None:
    tenants = Tenants([ANN, BOB])
    for key in given_keys:
        if key not in (ANN, BOB):
            with pytest.raises(NotAuthorized):
                tenants.of(key)


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "key"),
    [
        (None, None, None),
        ("Bearer af-1", None, "af-1"),
        ("bEARER   af-1 ", None, "af-1"),
        (None, " af-2 ", "af-2"),
        ("Bearer af-1", "af-2", "af-1"),
        ("Basic dTpw", "af-2", "af-2"),
        ("Basic dTpw", None, None),
        ("Bearer", None, ""),
        ("Bearer ", "af-2", "af-2"),
        ("", "", ""),
        ("Bearer af-1 af-2", None, "af-1 af-2"),
        ("Bearer \xff\x00", None, "\xff\x00"),
    ],
)
def test_the_key_of_a_header(authorization: str | None, x_api_key: str | None, key: str | None) -> None:
    assert key_of_header(authorization, x_api_key) == key


@given(authorization=st.none() | st.text(), x_api_key=st.none() | st.text())
def test_odd_headers_are_wrong_keys_and_no_faults(authorization: str | None, x_api_key: str | None) -> None:
    with pytest.raises(NotAuthorized):
        Tenants([ANN]).of(key_of_header(authorization, x_api_key))


HASHED = hashed_key(ANN)
NAME = "a tenant's name is 1 to 64 printable characters"
TWICE = f'[tenants.ann]\nkeys = ["{HASHED}"]\n[tenants.bob]\nkeys = ["{HASHED}"]'


def ann(fields: str, keys: str = "[]") -> str:
    return f"[tenants.ann]\nkeys = {keys}\n{fields}"


REFUSED = {
    "no TOML": ("[tenants.ann", "TOML"),
    "nobody": ("", "no tenants"),
    "no table of tenants": ("tenants = 3", "no tenants"),
    "another table": ("[tenant.ann]\nkeys = []", "'tenant'"),
    "no table": ("[tenants]\nann = 3", r"tenants\.ann must be a table"),
    "no keys": ("[tenants.ann]\nweight = 1.0", r"tenants\.ann: .*`keys`"),
    "one key": (ann("", f'"{HASHED}"'), r"tenants\.ann\.keys: Expected `array`"),
    "key in plain text": (ann("", f'["{ANN}"]'), r"tenants\.ann\.keys\[0\] is not a hashed key.*sha256sum"),
    "half a hash": (ann("", '["sha256:00"]'), r"tenants\.ann\.keys\[0\] is not a hashed key"),
    "twice": (ann("", f'["{HASHED}", "{HASHED}"]'), r"ann\.keys\[1\] .*tenants\.ann\.keys\[0\]"),
    "two tenants": (TWICE, r"bob\.keys\[0\] .*tenants\.ann"),
    "unknown field": (ann("weights = 1"), r"tenants\.ann\.weights: .*keys, weight"),
    "share of another type": (ann('weight = "2"'), r"tenants\.ann\.weight: Expected `float`, got `str`"),
    "share of nothing": (ann("weight = 0"), r"tenants\.ann\.weight: Expected `float` >= 0\.01"),
    "infinite share": (ann("weight = inf"), r"tenants\.ann\.weight: Expected `float` <= 100"),
    "share that is no number": (ann("weight = nan"), r"tenants\.ann\.weight: "),
    "half a request": (ann("requests_per_minute = 0.5"), r"ann\.requests_per_minute: Expected `int \| null`"),
    "no tokens": (ann("tokens_per_minute = 0"), r"ann\.tokens_per_minute: Expected `int` >= 1"),
    "yes as a number": (ann("max_unfinished = true"), r"ann\.max_unfinished: .*got `bool`"),
    "no model": (ann("models = []"), r"tenants\.ann\.models: Expected `array` of length >= 1"),
    "nameless model": (ann('models = [""]'), r"tenants\.ann\.models\[0\]: Expected `str` of length >= 1"),
    "a number as yes": (ann("sees_metrics = 1"), r"tenants\.ann\.sees_metrics: Expected `bool`"),
    "no name": ('[tenants.""]\nkeys = []', NAME),
    "spaces": ('[tenants." "]\nkeys = []', NAME),
    "line break": ('[tenants."a\\nb"]\nkeys = []', NAME),
    "long name": (f"[tenants.{'n' * 65}]\nkeys = []", NAME),
    "same tenant twice": (ann("[tenants.ann]\nkeys = []"), "TOML"),
    "deep": ("tenants = " + "[" * 100_000, "TOML"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_an_error_in_the_file_is_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(BadArgument, match=message) as caught:
        Tenants(file=file)
    shown = str(caught.value)
    assert shown.startswith(f"{file}: ")
    assert "\n" not in shown
    assert ANN not in shown


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"missing\.toml: .*No such file"):
        Tenants(file=tmp_path / "missing.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(BadArgument, match=r"binary\.toml: .*TOML"):
        Tenants(file=binary)


@pytest.mark.parametrize("key", ["", " ", " af-1", "schlüssel", "line\n", "\udcff"])
def test_keys_of_the_command_line_must_fit_into_a_header(key: str) -> None:
    with pytest.raises(BadArgument):
        Tenants([key])


def test_the_file_and_the_command_line_may_not_contradict_each_other(tmp_path: Path) -> None:
    file = written(tmp_path, f'[tenants.default]\nkeys = ["{HASHED}"]')
    with pytest.raises(BadArgument, match=r"tenants\.default "):
        Tenants([BOB], file)
    assert Tenants(file=file).of(ANN) == Tenant("default")
    with pytest.raises(BadArgument, match=r"tenants\.ann "):
        Tenants([ANN], written(tmp_path, WHOLE))


def test_the_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    file = written(tmp_path, WHOLE)
    tenants = Tenants(file=file)
    for broken in (WHOLE + "\n[tenants.carl]\nkeys = [3]", "", "[tenants"):
        file.write_text(broken)
        with pytest.raises(BadArgument):
            tenants.reload()
        assert tenants.of(ANN).weight == 2.0
        assert tenants.of(BOB).name == "bob & co"
    file.unlink()
    with pytest.raises(BadArgument):
        tenants.reload()
    assert tenants.of(ANN).weight == 2.0
    before = tenants.of(ANN)
    file.write_text(WHOLE.replace("weight = 2", "weight = 3").replace(hashed_key(BOB), hashed_key("af-new")))
    tenants.reload()
    assert tenants.of(ANN).weight == 3.0
    assert before.weight == 2.0
    assert tenants.current(before) is tenants.of(ANN)
    assert tenants.of("af-new").name == "bob & co"
    with pytest.raises(NotAuthorized):
        tenants.of(BOB)
    file.write_text(WHOLE.replace("[tenants.ann]", "[tenants.anna]"))
    tenants.reload()
    with pytest.raises(NotAuthorized):
        tenants.current(before)


@pytest.mark.timeout(60)
def test_f37_a_request_takes_as_many_steps_with_thousands_of_tenants(tmp_path: Path) -> None:
    """Each look-up walked through all tenants: milliseconds of the event loop for a request at 10,000."""

    def steps(num_others: int) -> int:
        others = [f'[tenants.t{n}]\nkeys = ["{hashed_key(f"af-{n}")}"]' for n in range(num_others)]
        tenants = Tenants(file=written(tmp_path, "\n".join([*others, WHOLE])))
        gate = TenantGate(ClockNs(), current=tenants.current)
        with counted_lines() as lines:
            tenant = tenants.of_request({"authorization": f"Bearer {ANN}"}, "192.0.2.1")
            gate.check(tenant)
            with gate.request(tenant, prompt_tokens=3):
                gate.state(tenant)
            assert not gate.is_unlimited(tenant)
            assert not gate.limits_cost(tenant)
            assert tenants.find("ann") is tenant
            assert tenants.still_names(ANN, tenant)
            with pytest.raises(NotAuthorized):
                tenants.of("af-wrong")
        return lines.num

    steps(1)  # the first use imports or compiles
    assert steps(1) == steps(2_000)


@given(
    entries=st.dictionaries(
        st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=64),
        st.tuples(
            st.integers(0, 3),
            st.none() | st.integers(1, 10**12),
            st.none() | st.floats(0.01, 100),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, entries) -> None:
    lines, expected = [], {}
    for name, (num_keys, requests, share, sees_metrics) in entries.items():
        hashes = [hashed_key(f"{name} {number}") for number in range(num_keys)]
        tenant = Tenant(name, 1.0 if share is None else share, requests, sees_metrics=sees_metrics)
        expected |= dict.fromkeys(hashes, tenant)
        lines += [f"[tenants.{name}]", f"keys = {hashes}", f"sees_metrics = {str(sees_metrics).lower()}"]
        lines += [f"requests_per_minute = {requests}"] * (requests is not None)
        lines += [f"weight = {share!r}"] * (share is not None)
    file = written(tmp_path_factory.mktemp("keys"), "\n".join(lines))
    assert read_keys_file(file) == expected
