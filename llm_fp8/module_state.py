"""What a library's linear modules say of the step behind them, added up: the account that a certificate holds against the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModuleState:
    """The state of some linear modules of one library."""

    num_modules: int = 0
    num_in_fp8: int = 0
    """Whose last forward pass ran in fp8."""
    num_unreadable: int = 0
    """Which do not say whether it did, where the version of the library that is known here does."""
    num_recipe_unreadable: int = 0
    """Which ran in fp8 and do not show recipe and quantizers, where that version does."""
    recipes: dict[str, int] = field(default_factory=dict)
    """Recipe in force (of Transformer Engine: its class) -> modules."""
    quantizers: dict[str, int] = field(default_factory=dict)
    """Class of quantizer -> how many, forward and backward; Transformer Engine only."""
    num_without_maxima: int = 0
    """Modules whose history of maxima in the forward pass holds nothing; delayed scaling only."""
    library: str = "Transformer Engine"

    @property
    def num_outside_fp8(self) -> int:
        """Modules which say that they did not compute in fp8."""
        return self.num_modules - self.num_in_fp8 - self.num_unreadable

    @property
    def all_in_fp8(self) -> bool:
        """Whether every module says that it computed in fp8."""
        return 0 < self.num_modules == self.num_in_fp8
