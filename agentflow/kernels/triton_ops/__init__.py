"""The kernels in Triton, for GPUs. They run on CPUs only under Triton's interpreter (``TRITON_INTERPRET=1``),
for tests.

``units`` divides the attention of a batch into units of work, ``device_plan`` holds them on the device, and
``paged_attention`` computes them, for ``triton_attention``. ``row_ops`` has norms, rotary embeddings and the activation;
``one_row`` multiplies one row with a dense weight, ``quantised`` any rows with weights in blocks, ``fp8``
with weights in 8-bit floats, ``split_products`` is what these two share, and ``triton_linear`` chooses among
them and torch's products; ``triton_sampler`` chooses tokens. ``interpreted`` has the products and the rounding
that all kernels share, and ``early_start`` their launch before the kernel in front has ended.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels.decoder_weights import DecoderWeights
from agentflow.kernels.inputs import ChoiceRows, LinearWeight
from agentflow.kernels.torch_ops import layer_norm as layer_norm
from agentflow.kernels.triton_ops.interpreted import IS_INTERPRETED as INTERPRETED
from agentflow.kernels.triton_ops.row_ops import add_rms_norm as add_rms_norm
from agentflow.kernels.triton_ops.row_ops import rms_norm as rms_norm
from agentflow.kernels.triton_ops.row_ops import rope_and_write as rope_and_write
from agentflow.kernels.triton_ops.row_ops import silu_and_multiply
from agentflow.kernels.triton_ops.triton_attention import TritonAttention
from agentflow.kernels.triton_ops.triton_linear import TritonLinear
from agentflow.kernels.triton_ops.triton_sampler import TritonSampler

IS_INTERPRETED: bool = INTERPRETED.value
"""Whether Triton's interpreter runs the kernels."""
QUEUES_WORK = True
sampler = TritonSampler()
linear = TritonLinear()
attention = TritonAttention()


def check(device: torch.device) -> None:
    """Compiles and runs small kernels, and those that choose tokens, which requests would wait for otherwise.
    Raises Triton's error if that is impossible here."""
    x = torch.tensor([[0.0, 2.0]], device=device)
    is_right = silu_and_multiply(x).item() == 0.0
    logits = torch.zeros(1, 64, device=device)
    logits[0, 7] = 50.0
    one = np.ones(1, dtype=np.float32)
    rows = ChoiceRows(np.array([-1]), one, np.array([2]), 0.9 * one, 0 * one, np.array([0.5]))
    if not is_right or sampler.choose(logits, sampler.stage(rows, device)).tolist() != [7]:
        raise RuntimeError("a kernel computes another result than it should")


def whole_forward(weights: DecoderWeights, head: LinearWeight) -> None:
    return None
