"""The certificate for a run of axolotl. Two lines of its YAML file add it:

    plugins:
      - llm_fp8.tools.axolotl_plugin.CertificatePlugin

See `llm_fp8.tools.hf_trainer_callback`. Read in axolotl 0.19.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from llm_fp8.tools.hf_trainer_callback import CertificateCallback


class CertificatePlugin(BasePlugin):
    """Adds `CertificateCallback` to axolotl's trainer."""

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[CertificateCallback]:
        """Make the callback after axolotl has put its requests to Accelerate into the environment."""
        return [CertificateCallback()]
