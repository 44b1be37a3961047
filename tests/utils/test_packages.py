"""An error about a missing optional package contains the command that installs the package."""

from __future__ import annotations

import pytest

from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import OptionalPackage


def test_optional_package_is_imported_or_reported_with_install_command():
    assert OptionalPackage("JSON", "json.decoder", "none").require("--flag").__name__ == "json.decoder"
    with pytest.raises(UserError, match="^--flag needs it .* run: pip install it$"):
        OptionalPackage("it", "no_such_module.part", "pip install it").require("--flag")
