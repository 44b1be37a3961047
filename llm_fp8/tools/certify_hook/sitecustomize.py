"""Python runs this file at the start of each process of a command that `llm-fp8 certify` runs, since it is on the path.
Once the process has imported torch's optimizers, their steps are followed by `llm_fp8.tools.certify.after_step`.
"""

import importlib.abc
import importlib.util
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module):  # type: ignore[no-untyped-def]
            execute(module)
            module.register_optimizer_step_post_hook(_after_step)

        spec.loader.exec_module = execute_and_register
        return spec


def _after_step(*arguments):  # type: ignore[no-untyped-def]
    from llm_fp8.tools.certify import after_step

    after_step(*arguments)


sys.meta_path.insert(0, _AfterTorch())
