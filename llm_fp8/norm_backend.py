"""Which kernels Transformer Engine's norms run on.

Its own RMSNorm is tuned for the widths of `TUNED_WIDTHS`; others take a general one, which is two to three times slower: on an H200, 16,384 tokens
of width 3,072, forward and backward with the quantising, 316 us beside cuDNN's 117 (docs/performance_log.md). Transformer Engine asks two variables
for cuDNN's norms, once in a process, at the first norm. cuDNN plans each number of tokens anew, which takes up to a second: packed micro-batches all
have one number, padded ones a few, because their rows end at multiples of 128 tokens. Small models would not earn it back.
"""

from __future__ import annotations

from collections.abc import MutableMapping

TUNED_WIDTHS = (512, 768, 1024, 2048, 4096, 8192)
"""Of Transformer Engine 2.20's RMSNorm kernels."""
MIN_WIDTH = 1024
HOPPER = 9
"""Major compute capability on which cuDNN's were compared with them."""
VARIABLES = ("NVTE_NORM_FWD_USE_CUDNN", "NVTE_NORM_BWD_USE_CUDNN")


def cudnn_is_faster(width: int) -> bool:
    """Whether norms of so many elements are left to cuDNN on such a GPU."""
    return width > MIN_WIDTH and width not in TUNED_WIDTHS


def choose_norm_backend(width: int, major_capability: int, environ: MutableMapping[str, str]) -> None:
    """Have norms of so many elements computed by cuDNN in this process where that is faster; what `environ` says already stays.

    Forward with current scaling it changes nothing: what finds the tensor's maximum on the way is Transformer Engine's own kernel.
    """
    if cudnn_is_faster(width) and major_capability == HOPPER:
        for name in VARIABLES:
            environ.setdefault(name, "1")
