"""The cost of calls to paid APIs, compared with genai-prices, and its cap."""

from __future__ import annotations

import builtins
from typing import Any

import genai_prices
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.backends.apis import prices
from agentflow.backends.apis.prices import Price, Spending, cost, find_price, highest_cost, require_price
from agentflow.errors import BadArgument, BudgetExceeded, NotSupported
from agentflow.protocol.events import Usage

PRICED = [
    ("openai", "gpt-4o"),
    ("openai", "gpt-5.4"),  # costs more with long prompts
    ("openai", "gpt-5-pro"),  # without a price for cached tokens
    ("anthropic", "claude-haiku-5-5"),  # costs more with long prompts, cached and written tokens too
    ("anthropic", "claude-opus-5-5"),
]
TOKENS = st.integers(0, 200_000) | st.sampled_from([99_999, 100_000, 100_001, 272_000, 272_001])


@pytest.mark.parametrize(("vendor", "model"), PRICED)
@given(plain=TOKENS, cached=TOKENS, written=TOKENS, output=TOKENS)
def test_costs_are_those_of_genai_prices(
    vendor: str, model: str, plain: int, cached: int, written: int, output: int
) -> None:
    if vendor == "openai":
        written = 0  # it has no price
    prompt = plain + cached + written
    found = cost(require_price(vendor, model), Usage(prompt, cached, output, written_tokens=written))
    theirs = genai_prices.Usage(
        input_tokens=prompt, cache_read_tokens=cached, cache_write_tokens=written, output_tokens=output
    )
    expected = genai_prices.calc_price(theirs, model, provider_id=vendor).total_price
    assert found == pytest.approx(float(expected))


@pytest.mark.parametrize(("vendor", "model"), PRICED)
@given(plain=TOKENS, cached=TOKENS, written=TOKENS, output=TOKENS, spare=st.integers(0, 400_000))
def test_no_call_costs_more_than_its_highest_cost(
    vendor: str, model: str, plain: int, cached: int, written: int, output: int, spare: int
) -> None:
    price = require_price(vendor, model)
    prompt = plain + cached + written
    found = cost(price, Usage(prompt, cached, output, written_tokens=written))
    assert found <= highest_cost(price, prompt + spare, output + spare) * (1 + 1e-9)


def test_own_prices_come_first() -> None:
    own = {"gpt-4o": Price(input=1, output=2), "local": Price(input=0, output=0)}
    assert find_price("openai", "gpt-4o", own) is own["gpt-4o"]
    assert find_price("vllm", "local", own) is own["local"]
    assert cost(own["gpt-4o"], Usage(1_000_000, 500_000, 1_000_000)) == 3.0


@pytest.mark.parametrize(
    ("vendor", "model", "base_url"),
    [
        ("openai", "gpt-0", None),
        ("openai", "text-embedding-3-small", None),  # it has no price of output
        ("vllm", "gpt-4o", None),
        ("vllm", "gpt-4o", "http://127.0.0.1:8000/v1"),
        ("openai", "gpt-4o", "http://127.0.0.1:8000/v1"),
    ],
)
def test_an_unknown_price_forbids_a_cap(vendor: str, model: str, base_url: str | None) -> None:
    assert find_price(vendor, model, base_url=base_url) is None
    with pytest.raises(NotSupported) as raised:
        require_price(vendor, model, base_url=base_url)
    assert raised.value.param == "max_cost"
    assert model in str(raised.value)


def test_the_address_tells_the_provider() -> None:
    assert find_price("generic", "gpt-4o", base_url="https://api.openai.com/v1") == find_price(
        "openai", "gpt-4o"
    )


def test_without_the_package_only_own_prices_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without_package(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("genai_prices"):
            raise ImportError(name)
        return imported(name, *args, **options)

    prices._known_price.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without_package)
    with pytest.raises(NotSupported, match=r"agentflow-lm\[api\]"):
        require_price("openai", "gpt-4o")
    assert require_price("openai", "gpt-4o", {"gpt-4o": Price(input=1, output=1)})
    prices._known_price.cache_clear()


@pytest.mark.parametrize("wrong", [-1, float("nan"), "3", True])
@pytest.mark.parametrize("name", ["input", "output", "cached", "written"])
def test_a_wrong_price_is_refused(name: str, wrong: Any) -> None:
    fields: dict[str, Any] = {"input": 1, "output": 1, name: wrong}
    for price in (Price(**fields), Price(input=1, output=1, longer=((1_000, Price(**fields)),))):
        with pytest.raises(BadArgument) as raised:
            find_price("openai", "gpt-4o", {"gpt-4o": price})
        assert raised.value.param == name


@pytest.mark.parametrize("wrong", [-1, float("nan"), "3"])
def test_a_wrong_cap_is_refused(wrong: Any) -> None:
    with pytest.raises(BadArgument) as raised:
        Spending(wrong)
    assert raised.value.param == "max_cost"


def test_a_cap_counts_the_calls_that_run() -> None:
    spending = Spending(1.0)
    with spending.reserved(0.6) as first:
        with pytest.raises(BudgetExceeded) as raised, spending.reserved(0.6):
            pass
        assert raised.value.param == "max_cost"
        with spending.reserved(0.4) as second:
            second.cost = 0.1
        first.cost = 0.2
    assert spending.spent == spending.committed == pytest.approx(0.3)
    with spending.reserved(0.7):
        pass
    assert spending.spent == pytest.approx(1.0)


def test_a_lost_call_is_charged_as_if_it_had_run() -> None:
    spending = Spending(1.0)
    with pytest.raises(ZeroDivisionError), spending.reserved(0.5):
        raise ZeroDivisionError
    with spending.reserved(0.5) as refused:
        refused.cost = 0.0
    assert spending.committed == spending.spent == 0.5


@given(
    st.lists(st.tuples(st.integers(0, 100), st.none() | st.integers(0, 100)), max_size=30),
    st.integers(0, 500),
)
def test_costs_never_exceed_the_cap(calls: list[tuple[int, int | None]], cap: int) -> None:
    spending = Spending(float(cap))
    for highest, actual in calls:
        try:
            with spending.reserved(float(highest)) as call:
                call.cost = None if actual is None else float(min(actual, highest))
                assert spending.committed <= cap
        except BudgetExceeded:
            assert spending.spent + highest > cap
    assert spending.committed == spending.spent <= cap


def test_without_a_cap_any_cost_is_counted() -> None:
    spending = Spending()
    with spending.reserved(1e9) as call:
        call.cost = 2.0
    assert spending.spent == 2.0
