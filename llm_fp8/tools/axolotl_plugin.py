"""Certify the kernels that an axolotl run executes. Add these two lines to axolotl's YAML file:

    plugins:
      - llm_fp8.tools.axolotl_plugin.CertificatePlugin

See `llm_fp8.tools.hf_trainer_callback` for the certificate. Checked against the source of axolotl 0.19.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from llm_fp8.tools.hf_trainer_callback import CertificateCallback


class CertificatePlugin(BasePlugin):
    """Add `CertificateCallback` to axolotl's trainer."""

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[CertificateCallback]:
        """Return a callback. Its constructor reads Accelerate's environment variables, which axolotl has now set."""
        return [CertificateCallback()]
