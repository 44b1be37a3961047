"""The one place that replaces a module's `forward`.

Hooks cannot enclose a forward pass, and a wrapping module would change parameters' names. So `forward` becomes an
attribute of the instance. Wrappers nest, the last one outermost: first autocast off for modules kept in bf16
(`Precision.attach`), then recomputation (`enable_gradient_checkpointing`), which so runs in the precision of the first
pass. FSDP2 and torch.compile act on the module around both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def wrap_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """From now on `module.forward(*args, **kwargs)` is `wrapper(the forward until now, *args, **kwargs)`."""
    module.forward = functools.partial(wrapper, module.forward)
