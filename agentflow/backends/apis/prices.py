"""The cost of calls to paid APIs, and a cap on it.

Prices come from the program or from the package ``genai-prices``. A cap reserves the highest cost of a call
before the call is sent, so that concurrent calls together stay below it. Amounts are US dollars.

>>> price = Price(input=3, output=15, cached=0.3)
>>> cost(price, Usage(prompt_tokens=1_000, cached_tokens=900, output_tokens=100))
0.00207
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

import msgspec

from agentflow.errors import BadArgument, BudgetExceeded, NotSupported
from agentflow.protocol.events import Usage
from agentflow.protocol.record import Record
from agentflow.protocol.sampling import is_number
from agentflow.runtime.payer import PAYER, Payer

_MILLION = 1_000_000
BATCH_SHARE = 0.5
"""OpenAI and Anthropic charge half of each price for the tokens of batches. ``genai-prices`` does not have
these prices."""
_HIGHEST_PRICE = 1e9  # the cost of a call stays a finite number


class Price(Record, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of a model, in US dollars for a million tokens.

    >>> price = af.Price(input=0.4, output=1.6, cached=0.1)
    >>> backend = af.OpenAI("my-model", base_url="http://127.0.0.1:8000/v1", api_key="sk-...")
    >>> flow = af.session(backend=backend, prices={"my-model": price}, max_cost=5.0)
    """

    input: float  # tokens of the prompt
    output: float  # tokens of the output, including reasoning
    cached: float | None = None  # tokens of the prompt that were read from the cache; None: as ``input``
    written: float | None = None  # tokens of the prompt that were written to the cache; None: as ``input``
    # Prices of calls whose prompt has more tokens than a number, for all their tokens. In ascending order.
    longer: tuple[tuple[int, Price], ...] = ()

    def check(self) -> Price:
        """Returns itself, or raises ``BadArgument`` if a price is negative or no number. For the session."""
        for name in ("input", "output", "cached", "written"):
            value = getattr(self, name)
            if not is_number(0 if value is None else value, 0, _HIGHEST_PRICE):
                raise BadArgument(f"Price: {name} must be a number of dollars, not {value!r}", param=name)
        if not _are_longer(self.longer):
            raise BadArgument(
                "Price: longer must be pairs of a number of tokens, in ascending order, and a Price, not "
                f"{self.longer!r:.200}",
                param="longer",
            )
        for _, price in self.longer:
            price.check()
        return self

    def in_batches(self) -> Price:
        """The price of the same tokens in a batch of the vendor. For the backends."""
        scaled = {
            name: None if (value := getattr(self, name)) is None else value * BATCH_SHARE
            for name in ("input", "output", "cached", "written")
        }
        longer = tuple([(above, price.in_batches()) for above, price in self.longer])
        return Price(**scaled, longer=longer)  # type: ignore[arg-type]

    def of_prompt(self, prompt_tokens: int) -> Price:
        """The prices that apply to a call with this prompt. For the backends."""
        return next((price for above, price in reversed(self.longer) if prompt_tokens > above), self)


def _are_longer(pairs: object) -> bool:
    if not isinstance(pairs, tuple | list):
        return False
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        return False
    starts = [start for start, _ in pairs]
    are_typed = all(isinstance(price, Price) and is_number(start, 0, math.inf) for start, price in pairs)
    return are_typed and starts == sorted(starts)


Prices = Mapping[str, Price]
"""Prices that a program gives, by the name of the model."""


def check_prices(prices: object) -> Prices | None:
    """Returns the prices that a program gives, or raises ``BadArgument``."""
    if prices is None:
        return None
    if not isinstance(prices, Mapping) or not all(isinstance(price, Price) for price in prices.values()):
        raise BadArgument(f"prices must be a dict of model to af.Price, not {prices!r:.200}", param="prices")
    for price in prices.values():
        price.check()
    return prices


def cost(price: Price, usage: Usage) -> float:
    """The cost of a call with these tokens."""
    price = price.of_prompt(usage.prompt_tokens)
    cached = price.input if price.cached is None else price.cached
    written = price.input if price.written is None else price.written
    plain_tokens = max(0, usage.prompt_tokens - usage.cached_tokens - usage.written_tokens)
    dollars = plain_tokens * price.input + usage.cached_tokens * cached + usage.written_tokens * written
    return (dollars + usage.output_tokens * price.output) / _MILLION


def highest_cost(price: Price, prompt_tokens: int, max_tokens: int) -> float:
    """The highest cost that a call can have.

    Args:
        price: The prices of the model.
        prompt_tokens: At least as many tokens as the prompt has. The bytes of a text are such a number.
        max_tokens: The limit of the output, with reasoning.
    """
    # A shorter prompt may cost more: prices need not rise with the length.
    longest = [shorter for above, shorter in price.longer if prompt_tokens > above]
    return max(
        (prompt_tokens * max(one.input, one.cached or 0, one.written or 0) + max_tokens * one.output)
        / _MILLION
        for one in (price, *longest)
    )


def find_price(
    vendor: str,
    model: str,
    own: Prices | None = None,
    base_url: str | None = None,
    *,
    embeds: bool = False,
) -> Price | None:
    """The price of a model, None if it is unknown.

    Args:
        vendor: ``openai``, ``anthropic``, or the flavour of a compatible server.
        model: The name of the model.
        own: Prices of the program, which come first.
        base_url: The address of the API, if it is not the vendor's own. It tells the provider.
        embeds: The model makes embeddings, and has no output to pay for.
    """
    found = (own or {}).get(model)
    return found.check() if found is not None else _known_price(vendor, model, base_url, embeds)


def require_price(
    vendor: str,
    model: str,
    own: Prices | None = None,
    base_url: str | None = None,
    *,
    embeds: bool = False,
) -> Price:
    """Like ``find_price``, for a session with a cap.

    Raises:
        NotSupported: The price is unknown, so the cap could not be kept.
    """
    price = find_price(vendor, model, own, base_url, embeds=embeds)
    if price is not None:
        return price
    remedy = f"give it as prices={{{model!r}: af.Price(input=…, output=…)}}, or leave out max_cost"
    if not _has_package():
        remedy = f"pip install 'agentflow-lm[api]', {remedy}"
    raise NotSupported(f"the price of {model} at {base_url or vendor} is unknown: {remedy}", param="max_cost")


class Spending:
    """The costs of the calls of a session or a run, and their cap.

    Args:
        max_cost: The most that the calls may cost together; None: any amount.

    >>> spending = Spending(max_cost=1.0)
    >>> with spending.reserved(0.4) as call:
    ...     call.cost = 0.1
    >>> spending.spent
    0.1
    """

    def __init__(self, max_cost: float | None = None) -> None:
        if max_cost is not None and not is_number(max_cost, 0, float("inf")):
            raise BadArgument(f"max_cost must be a number of dollars, not {max_cost!r}", param="max_cost")
        self.max_cost = max_cost
        self.spent = 0.0
        self._reserved: dict[int, float] = {}  # the highest costs of the calls that run

    @property
    def committed(self) -> float:
        """The costs so far, and the highest costs of the calls that run."""
        return self.spent + sum(self._reserved.values())

    @contextmanager
    def reserved(self, highest: float) -> Iterator[CallCost]:
        """The scope of one call, within which its ``cost`` is set.

        A call that ends without a cost is charged ``highest``: the vendor may charge for an answer that was
        lost. Set the cost to 0 if the request was refused.

        Raises:
            BudgetExceeded: The call could exceed ``max_cost``.
        """
        if self.max_cost is not None and self.committed + highest > self.max_cost:
            raise BudgetExceeded(
                f"a call may cost ${highest:.4g}, and max_cost=${self.max_cost:g} leaves "
                f"${max(0.0, self.max_cost - self.committed):.4g}: raise max_cost, or lower max_tokens",
                param="max_cost",
            )
        call = CallCost()
        self._reserved[id(call)] = highest
        try:
            yield call
        finally:
            del self._reserved[id(call)]
            self.spent += highest if call.cost is None else call.cost


class CallCost:
    """The cost of one call, None while it is unknown."""

    def __init__(self) -> None:
        self.cost: float | None = None


@contextmanager
def _paid(payer: Payer | None, highest: float) -> Iterator[CallCost]:
    """The scope of a call that the payer pays for."""
    paid = CallCost()
    paid.cost = 0.0
    if payer is None:
        yield paid
        return
    settle = payer.reserve(highest)
    try:
        yield paid
    finally:
        settle(paid.cost)


LONGEST_OUTPUT = 128_000
UNCAPPED = Spending()


class Charge(Protocol):
    """Takes the usage of a call."""

    def __call__(self, usage: Usage, *, is_lost: bool = False) -> Usage:
        """The usage with its cost.

        Args:
            usage: The usage of the call, or an estimate.
            is_lost: The vendor may go on and charge more. The cap of the session, which it must not exceed,
                keeps the highest cost; the payer pays the estimate.
        """


def _charge_nothing(usage: Usage, *, is_lost: bool = False) -> Usage:
    return usage


class Billing(NamedTuple):
    """The costs of one model's calls.

    Attributes:
        price: The prices; None: unknown.
        spending: The costs of the session.
        longest_output: The tokens of an output without a limit.
    """

    price: Price | None = None
    spending: Spending = UNCAPPED
    longest_output: int = LONGEST_OUTPUT

    async def until_ready(self, prompt_tokens: int, max_tokens: int | None) -> None:
        """Prepares the payer for ``charged`` with the same arguments, which must follow immediately."""
        payer = PAYER.get()
        if payer is not None and self.price is not None:
            most = self.longest_output if max_tokens is None else max_tokens
            await payer.until_ready(highest_cost(self.price, prompt_tokens, most))

    @contextmanager
    def charged(self, prompt_tokens: int, max_tokens: int | None) -> Iterator[Charge]:
        """The scope of one call, whose function adds the cost to its usage.

        Args:
            prompt_tokens: As for ``highest_cost``.
            max_tokens: The limit of its output; None: as much as the model can write.

        Raises:
            BudgetExceeded: The call could exceed the cap of the session.
            RateLimited: It could exceed its payer's limit.
            NotSupported: Its price is unknown, and its payer has a limit.
        """
        price, payer = self.price, PAYER.get()
        if price is None:
            if payer is not None:
                payer.reserve(None)
            yield _charge_nothing
            return
        most = self.longest_output if max_tokens is None else max_tokens
        highest = highest_cost(price, prompt_tokens, most)
        with _paid(payer, highest) as paid, self.spending.reserved(highest) as call:
            paid.cost = None  # from here on, the call may be sent

            def add(usage: Usage, *, is_lost: bool = False) -> Usage:
                paid.cost = cost(price, usage)
                call.cost = None if is_lost else paid.cost
                return msgspec.structs.replace(usage, cost=paid.cost)

            yield add


FREE = Billing()
"""The billing of a model without a price."""


class Costs(NamedTuple):
    """The prices of a session, and the cap that its models share. ``prices``: of the program."""

    spending: Spending
    prices: Prices | None = None

    def of_model(
        self,
        vendor: str,
        model: str,
        base_url: str | None,
        longest_output: int | None,
        *,
        embeds: bool = False,
    ) -> Billing:
        """Returns the billing of one model. The arguments are as in ``find_price`` and ``Billing``.
        ``NotSupported`` if the session has a cap and the price is unknown."""
        find = find_price if self.spending.max_cost is None else require_price
        price = find(vendor, model, self.prices, base_url, embeds=embeds)
        return Billing(price, self.spending, longest_output or LONGEST_OUTPUT)


NO_COSTS = Costs(UNCAPPED)
"""The costs of a session without prices and without a cap."""


@functools.lru_cache(maxsize=256)
def _known_price(vendor: str, model: str, base_url: str | None, embeds: bool) -> Price | None:
    """The current price in ``genai-prices``."""
    if base_url is None and vendor not in ("openai", "anthropic"):
        return None
    try:
        from genai_prices import data_snapshot  # it takes long to import
    except ImportError:
        return None
    place = {"provider_id": vendor, "provider_api_url": None}
    if base_url is not None:
        place = {"provider_id": None, "provider_api_url": base_url}
    try:
        _, found = data_snapshot.get_snapshot().find_provider_model(model, None, **place)
    except LookupError:
        return None
    return _price(found.get_prices(datetime.now(UTC)), embeds)


def _price(prices: Any, embeds: bool) -> Price | None:
    """A price from a ``ModelPrice``; None if it does not price text."""
    fields = {
        "input": prices.input_mtok,
        "output": 0.0 if embeds else prices.output_mtok,
        "cached": prices.cache_read_mtok,
        "written": prices.cache_write_mtok,
    }
    if fields["input"] is None or fields["output"] is None:
        return None
    starts = sorted({tier.start for value in fields.values() for tier in getattr(value, "tiers", ())})
    longer = [(start, Price(**_dollars(fields, start + 1))) for start in starts]
    return Price(**_dollars(fields, 0), longer=tuple(longer))


def _dollars(fields: Mapping[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """The amounts for a prompt of this length."""
    found: dict[str, float] = {}
    for name, value in fields.items():
        if value is None:
            continue
        tiers = [tier for tier in getattr(value, "tiers", ()) if prompt_tokens > tier.start]
        found[name] = float(tiers[-1].price if tiers else getattr(value, "base", value))
    return found


def _has_package() -> bool:
    try:
        import genai_prices  # noqa: F401
    except ImportError:
        return False
    return True
