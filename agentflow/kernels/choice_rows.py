"""How a token is chosen from each row of logits, as the kernels are given it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(slots=True, frozen=True)
class ChoiceRows:
    """S rows. ``targets``: -1, or the token that is chosen whatever the logits are. ``temperatures``: 0 takes
    the likeliest, the first of equals. ``top_ks``: 0 keeps all. ``uniforms``: the number in [0, 1) that
    decides, of rows with a temperature. ``masked_rows`` [M] and ``mask_words`` [M, any]: the only tokens that
    these rows may choose, as bits of 32-bit words, the first token lowest; None where no row has a mask."""

    targets: IntArray
    temperatures: FloatArray
    top_ks: IntArray
    top_ps: FloatArray
    min_ps: FloatArray
    uniforms: NDArray[np.float64]
    masked_rows: IntArray | None = None
    mask_words: NDArray[np.uint32] | None = None
