"""Packages that only some options need are named with the command that installs them."""

from __future__ import annotations

import pytest

from llm_fp8.utils import packages
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import OptionalPackage

FLAG = "--flag"
PACKAGE = OptionalPackage("flash-attn-4", "flash_attn.cute.interface", "pip install it", "4.0.0b11")


def test_a_version_that_was_not_compared_is_refused(monkeypatch):
    package = PACKAGE
    monkeypatch.setattr(packages, "package_version", lambda name: None)
    with pytest.raises(
        UserError, match=rf"{FLAG} needs {package.name} {package.version}, which is not installed; run: pip install"
    ):
        package.require(FLAG)
    monkeypatch.setattr(packages, "package_version", lambda name: "4.0.0")
    with pytest.raises(UserError, match=r"and 4\.0\.0 is installed; run: pip install"):
        package.require(FLAG)
    loaded = []
    monkeypatch.setattr(packages.importlib, "import_module", loaded.append)
    monkeypatch.setattr(packages, "package_version", lambda name: package.version)
    package.require(FLAG)
    assert loaded == [package.module]


def test_a_package_that_does_not_load_is_one_sentence(monkeypatch):
    """Found before any weight is loaded; the CPU has the package's version alone."""
    monkeypatch.setattr(packages, "package_version", lambda name: PACKAGE.version)
    with pytest.raises(
        UserError, match=r"flash-attn-4, which is installed but does not load \(No module named .*\); run: pip install"
    ):
        PACKAGE.require(FLAG)


def test_any_version_will_do_where_none_is_named():
    assert OptionalPackage("JSON", "json.decoder", "none").require("--flag").__name__ == "json.decoder"
    with pytest.raises(UserError, match="^--flag needs it, which is not installed; run: pip install it$"):
        OptionalPackage("it", "no_such_module.part", "pip install it").require_installed("--flag")
