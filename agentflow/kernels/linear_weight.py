"""The weight of one linear layer, in the layouts that its kernels want."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, frozen=True)
class LinearWeight:
    """y = x Wᵀ + b for W of shape [out, in].

    ``transposed`` [in, out]: Wᵀ, a view of W as it came, in the model's dtype; None where every
    product goes through ``packed``.
    ``packed``: W in the opaque blocked layout of oneDNN, in the model's dtype or in float32, or in the panels
    of the native kernels; None where nothing is packed.
    ``bias`` [out]: in the model's dtype.
    ``shape``: (out, in).
    """

    transposed: Tensor | None
    packed: Tensor | None
    bias: Tensor | None
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes that this weight holds in memory. (An opaque tensor does not tell its own.)"""
        held = [tensor for tensor in (self.transposed, self.packed, self.bias) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)
