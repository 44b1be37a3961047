"""How a module's `forward` is wrapped: as an attribute of the instance, since hooks cannot enclose a forward pass and a
module around it would change parameters' names.

Wrappers nest, the last one outermost: first autocast off for modules kept in bf16 (`Precision.attach`), then
recomputation, which so runs in the precision of the first pass. FSDP2 and torch.compile act on the module around both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def wrap_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """From now on `module.forward(*args, **kwargs)` is `wrapper(the forward until now, *args, **kwargs)`."""
    module.forward = functools.partial(wrapper, module.forward)
