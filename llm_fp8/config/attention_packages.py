"""The packages of the attention that `llm_fp8.kernels.flash_attention` calls, by the value of --attn_implementation.

Without heavy imports: verify_fp8.py names them where torch does not load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

FLASH_ATTENTION_3: Final = "flash_attention_3"
"""Value of --attn_implementation for flash-attn 3 in the TE decoder."""
FLASH_ATTENTION_4: Final = "flash_attention_4"
"""Value of --attn_implementation for flash-attn 4 in the TE decoder."""
FlashAttention: TypeAlias = Literal["flash_attention_3", "flash_attention_4"]


@dataclass(frozen=True)
class FlashAttentionPackage:
    """Where a version of flash-attn comes from."""

    option: FlashAttention
    """Value of --attn_implementation."""
    name: str
    """For people."""
    package: str
    version: str
    """The one whose gradients were compared: others have other kernels."""
    install: str
    """The command, for torch with CUDA 13."""


CUDA_RUNTIME_PACKAGE = "nvidia-cuda-runtime-cu12"
"""Has the CUDA 12 runtime that flash-attn 3 is linked with; torch with CUDA 12 brings it, torch with CUDA 13 does
not.
"""

FLASH_ATTENTION_PACKAGES: Final[dict[str, FlashAttentionPackage]] = {
    package.option: package
    for package in (
        # xformers is built for one torch, but its file of flash-attn 3 is not (llm_fp8/kernels/flash_attention.py):
        # hence --no-deps.
        FlashAttentionPackage(
            FLASH_ATTENTION_3,
            "flash-attn 3",
            "xformers",
            "0.0.34",
            f"pip install --no-deps xformers==0.0.34 {CUDA_RUNTIME_PACKAGE}==12.8.90",
        ),
        FlashAttentionPackage(
            FLASH_ATTENTION_4,
            "flash-attn 4",
            "flash-attn-4",
            "4.0.0b11",
            "pip install 'flash-attn-4[cu13]==4.0.0b11' nvidia-cutlass-dsl==4.4.2 quack-kernels==0.4.1",
        ),
    )
}
