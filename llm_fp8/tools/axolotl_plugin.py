"""A certificate for runs of axolotl. These two lines in axolotl's YAML file add it:

    plugins:
      - llm_fp8.tools.axolotl_plugin.CertificatePlugin

See `llm_fp8.tools.hf_trainer_callback`. Checked against the source of axolotl 0.19.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from llm_fp8.tools.hf_trainer_callback import CertificateCallback


class CertificatePlugin(BasePlugin):
    """Adds `CertificateCallback` to axolotl's trainer."""

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[CertificateCallback]:
        """Return the callback. By now axolotl has put its requests to Accelerate into the environment."""
        return [CertificateCallback()]
