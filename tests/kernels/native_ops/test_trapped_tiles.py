"""The kernels for AMX on a processor that lacks its instructions: these are trapped and carried out
(``trapped_tiles.cpp``), in every test of the kernels at this level."""

import pytest
import torch
from kernel_cases import IS_TRAPPED, NativeAt, trapped_tiles


@pytest.mark.skipif(not IS_TRAPPED, reason="the processor has tiles, or lacks AVX-512")
def test_products_of_many_rows_are_carried_out_in_trapped_tiles() -> None:
    linear, before = NativeAt("amx").linear, trapped_tiles().trapped_products()
    x, weight = torch.randn(40, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    product = linear.multiply(x, linear.pack(weight, None))
    torch.testing.assert_close(product.float(), x.float() @ weight.float().T, rtol=1e-2, atol=0.2)
    assert trapped_tiles().trapped_products() - before >= 2 * 3 * 6  # tiles of 16 by 16, of 32 products each
