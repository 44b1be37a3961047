"""The package of flash-attn 4 that `llm_fp8.flash_attention` calls. Without imports: verify_fp8.py names it where torch does not load."""

from __future__ import annotations

PACKAGE, VERSION = "flash-attn-4", "4.0.0b11"
"""The one whose gradients were compared: its versions are betas, each with other kernels."""
INSTALL = f"pip install '{PACKAGE}[cu13]=={VERSION}' nvidia-cutlass-dsl==4.4.2 quack-kernels==0.4.1"
