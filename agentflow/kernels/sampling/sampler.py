"""The interface for choosing a token for each row of logits, for all rows of a batch together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from agentflow.kernels.inputs import ChoiceRows


class Sampler(ABC):
    """Chooses tokens on the device of the logits. A step reads their ids from the device once, at its end."""

    def stage(self, rows: ChoiceRows, device: torch.device) -> Any:
        """Prepares ``choose`` on a device: queues a single copy of the parameters on the current stream,
        without waiting for it. Call it at any time before ``choose``, such as before the forward pass. On a
        CPU, ``rows`` must not change until then."""
        return rows

    @abstractmethod
    def choose(self, logits: Tensor, staged: Any) -> Tensor:
        """Chooses one token per row of ``logits`` [S, vocabulary] float32. A row with a target gets the
        target. With temperature 0, a row gets the likeliest token that its mask allows; of equally likely
        tokens, the lowest id. The other rows draw a token:

        Divide the logits by the temperature. Keep the ``top_k`` likeliest tokens (0: all); of these, the
        smallest set of likeliest tokens that reaches ``top_p``; of these, the tokens at least ``min_p`` times
        as likely as the likeliest. Tokens as likely as the last one are also kept. Then invert the cumulative
        distribution, in order of token ids, at ``uniforms``.

        A probability is a weight divided by the sum of all weights. A weight is an integer,
        floor(2^35 exp((logit - highest) / temperature)), with the rounding of ``token_weights``. Sums of
        integers do not depend on the order, so all implementations choose the same tokens from the same
        logits, for vocabularies of up to 2^18 tokens. Tokens with less than 2^-35 times the highest
        probability are not drawn.

        Args:
            logits: one row for each token to choose.
            staged: from the same implementation's ``stage``.

        Returns:
            [S] int64 on the device of ``logits``. A row without a valid token gets ``NO_TOKEN`` or
            ``NOT_FINITE`` (``no_choice``). If the kernels queue their work (``queues_work``), this does not
            wait for the device, so that the next step can read the tokens there.
        """

    def log_sums(self, logits: Tensor) -> Tensor:
        """Returns log(sum(exp(logits))) of each row of [S, vocabulary] float32: [S]. Not finite if a logit is
        NaN or infinity, or if all are minus infinity."""
        # In parts, because intermediate results are as large as the logits.
        parts = torch.split(logits, 16 if logits.device.type == "cpu" else 64)
        return torch.cat([part.logsumexp(dim=-1) for part in parts])

    def likeliest(self, logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """Returns the ``num`` highest logits of each row, in descending order, and their tokens: [S, num]
        each. The order of ties depends only on the row and ``num``."""
        found = logits.topk(num, dim=-1)
        return found.values, found.indices
