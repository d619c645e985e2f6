"""The choice of tokens on the team's threads."""

from __future__ import annotations

import torch
from torch import Tensor

from agentflow.kernels.inputs import ChoiceRows
from agentflow.kernels.native_ops.structures import native_choices
from agentflow.kernels.native_ops.team import team
from agentflow.kernels.sampling.sampler import Sampler


class NativeSampler(Sampler):
    """``Sampler`` of the native kernels."""

    def choose(self, logits: Tensor, staged: ChoiceRows) -> Tensor:
        logits = logits.contiguous()
        tokens = torch.empty(len(logits), dtype=torch.int64)
        choices = native_choices(staged, logits.shape[1])
        choices.logits = logits.data_ptr()
        team().af_choose(choices, tokens.data_ptr())
        return tokens

    def log_sums(self, logits: Tensor) -> Tensor:
        logits, sums = logits.contiguous(), torch.empty(len(logits))
        team().af_log_sums(logits.data_ptr(), *logits.shape, sums.data_ptr())
        return sums

    def likeliest(self, logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        values, tokens = torch.empty(len(logits), num), torch.empty(len(logits), num, dtype=torch.int64)
        team().af_likeliest(logits.data_ptr(), *logits.shape, num, values.data_ptr(), tokens.data_ptr())
        return values, tokens
