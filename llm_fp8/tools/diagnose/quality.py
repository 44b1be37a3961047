"""What fp8's forward pass costs before any training, by kind of module: `diagnose_fp8.py --quality`.

The model predicts the same text in bf16, in fp8, with one kind of module alone in fp8, and with all but that kind. The
next-token distributions are compared with bf16's by the Kullback-Leibler divergence, in nats per supervised token;
bf16's own rounding diverges by about 0.001. The difference of the losses is no measure: on text that a model was not
trained on, any disturbance may lower the loss. The forward pass is what to look at: with a backward pass in bf16,
training SmolLM2-135M in fp8 ended as far above bf16 as with one in fp8.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_fp8.config.options import Config, RunConfig
from llm_fp8.data import Batch, prepare_data
from llm_fp8.distributed.process_group import start_process_group
from llm_fp8.kernels.softmax import IGNORE_INDEX
from llm_fp8.models.build import decoder_layers
from llm_fp8.models.layer_forward import wrap_forward
from llm_fp8.models.source import load_tokenizer
from llm_fp8.precision.modules import linear_weights
from llm_fp8.train.scale_warmup import warm_up_delayed_scales
from llm_fp8.train.setup import TrainingSetup, build_setup, plan_run, silent
from llm_fp8.utils.console import quiet_libraries
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks
from llm_fp8.utils.torch_internals import uncompiled

NUM_BATCHES = 4
NUM_LISTED = 10
"""Modules that the terminal shows; the JSON file has all."""
_CHUNK = 512
"""Tokens whose logits are in memory at a time."""


@dataclass(frozen=True)
class Cost:
    """How far the predictions of a forward pass are from those in bf16."""

    divergence: float
    """Kullback-Leibler divergence of the next-token distribution, nats per token."""
    loss_difference: float
    """Nats per token."""


@dataclass(frozen=True)
class KindCost:
    """Cost of all modules of one name."""

    name: str
    """As --fp8_bf16_modules takes it."""
    linear_flop_share: float
    """Share of all linear weights' FLOPs, lm_head included."""
    alone: Cost
    """With these modules alone in fp8."""
    without: Cost
    """With all but these in fp8."""


@dataclass(frozen=True)
class ModuleError:
    """Error of one module for the input that it has in a bf16 pass."""

    name: str
    relative_error: float
    """Norm of (fp8 output - bf16 output) / norm of the bf16 output."""
    input_peak: float
    """Largest input value over the input's root mean square: outliers leave few of fp8's values to the others."""


@dataclass(frozen=True)
class QualityFindings:
    """What `measure_quality` found; kinds by what leaving them out saves for their FLOPs, modules by error."""

    scenario: str
    num_tokens: int
    all_in_fp8: Cost
    kinds: list[KindCost]
    modules: list[ModuleError]

    def describe(self) -> str:
        total = self.all_in_fp8
        lines = [
            f"fp8 {self.scenario} before training, {self.num_tokens} supervised tokens: KL divergence from bf16 "
            f"{total.divergence:.4f} nats a token, loss {total.loss_difference:+.4f}",
            f"{'modules':24}{'linear FLOPs':>14}{'KL alone':>12}{'KL without':>12}",
        ]
        lines += [
            f"{kind.name:24}{kind.linear_flop_share:>14.1%}{kind.alone.divergence:>12.4f}{kind.without.divergence:>12.4f}"
            for kind in self.kinds
        ]
        lines.append("largest errors of single modules (relative error of the output; largest input over its rms):")
        lines += [
            f"  {error.name:38}{error.relative_error:8.4f}{error.input_peak:10.0f}"
            for error in self.modules[:NUM_LISTED]
        ]
        best = self.kinds[0]
        saved = total.divergence - best.without.divergence
        lines.append(
            f"--fp8_bf16_modules {best.name} would take {saved / total.divergence:.0%} off the divergence for "
            f"{best.linear_flop_share:.1%} of the linear FLOPs"
            if saved > 0
            else "no kind of module in bf16 would lower the divergence"
        )
        return "\n".join(lines)


def measure_quality(config: Config) -> QualityFindings:
    """Measure the model and recipe of the run that `config`, which was checked, describes, on batches of its eval text,
    else of its training text. Raises `UserError` as the run itself would.
    """
    ranks = LaunchRanks.from_environment(os.environ)
    start_process_group(ranks)
    quiet_libraries()
    # It writes nothing and sends nothing to a tracker.
    plan = plan_run(dataclasses.replace(config, run=RunConfig(output_dir=os.devnull)), ranks, say=silent)
    if plan.precision.recipe is None:
        raise UserError("--quality compares fp8 with bf16; add --mixed_precision fp8.")
    data = prepare_data(config, load_tokenizer(config.model, plan.source)[0])
    text: Iterable[Batch] = itertools.chain.from_iterable(data.train) if data.eval is None else data.eval
    batches = [batch.to(plan.device) for batch in itertools.islice(text, NUM_BATCHES)]
    setup = build_setup(plan)
    num_supervised = float(batches[0].num_supervised_tokens)
    warm_up_delayed_scales(setup.training_model, setup.precision, batches[0], num_supervised)
    setup.training_model.eval()
    with torch.no_grad(), setup.precision.preserving_state(), uncompiled(decoder_layers(setup.model)):
        return _Comparison(setup, batches).findings()


class _Comparison:
    """A model whose modules can be taken out of fp8, and bf16's last hidden states of `batches`."""

    def __init__(self, setup: TrainingSetup, batches: list[Batch]) -> None:
        self.setup, self.batches = setup, batches
        precision = setup.precision
        self.names = {module: name for name, module in setup.model.named_modules() if module in precision.fp8_modules}
        self._in_bf16: Collection[nn.Module] = self.names
        self._errors: dict[nn.Module, ModuleError] = {}
        for module in self.names:
            wrap_forward(module, functools.partial(self._forward, module))
        self.reference = [self._hidden(batch) for batch in batches]

    def findings(self) -> QualityFindings:
        kinds: dict[str, list[nn.Module]] = {}
        for module, name in self.names.items():
            kinds.setdefault(re.split(r"\.\d+\.", name)[-1], []).append(module)
        # lm_head's too.
        total = sum(weight.numel() for module in self.setup.model.modules() for weight in linear_weights(module))
        costs = [
            KindCost(
                name=kind,
                linear_flop_share=sum(w.numel() for module in modules for w in linear_weights(module)) / total,
                alone=self.cost(in_bf16=self.names.keys() - set(modules)),
                without=self.cost(in_bf16=set(modules)),
            )
            for kind, modules in kinds.items()
        ]
        everything = self.cost(in_bf16=())
        costs.sort(key=lambda cost: (cost.without.divergence - everything.divergence) / cost.linear_flop_share)
        return QualityFindings(
            scenario=str(self.setup.plan.precision.effective_scenario),
            num_tokens=sum(len(hidden) for hidden in self.reference),
            all_in_fp8=everything,
            kinds=costs,
            modules=sorted(self._errors.values(), key=lambda error: -error.relative_error),
        )

    def cost(self, in_bf16: Collection[nn.Module]) -> Cost:
        """The cost of fp8 in all but these modules."""
        self._in_bf16 = in_bf16
        sums = torch.zeros(2, dtype=torch.float64, device=self.setup.plan.device)
        weight = self.setup.model.get_output_embeddings().weight
        for batch, reference in zip(self.batches, self.reference, strict=True):
            labels = batch.labels[batch.labels != IGNORE_INDEX]
            parts = [tensor.split(_CHUNK) for tensor in (reference, self._hidden(batch), labels)]
            for right, found, label in zip(*parts, strict=True):
                log_p, log_q = (F.log_softmax((h @ weight.to(h.dtype).t()).float(), -1) for h in (right, found))
                difference = log_p - log_q
                sums[0] += (log_p.exp() * difference).sum()
                sums[1] += difference.gather(-1, label[:, None]).sum()
        divergence, loss_difference = (sums / sum(len(hidden) for hidden in self.reference)).tolist()
        return Cost(divergence, loss_difference)

    def _hidden(self, batch: Batch) -> Tensor:
        """Last hidden states of the supervised tokens [tokens, h]."""
        with self.setup.precision.context(first_microbatch=None):
            return self.setup.training_model.hidden(batch)[batch.labels != IGNORE_INDEX]

    def _forward(self, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if module not in self._in_bf16:
            return forward(*args, **kwargs)
        if isinstance(module, nn.Linear):  # torchao's, whose class computes in fp8 by itself
            output = nn.Linear.forward(module, *args)
        else:
            output = self.setup.precision.without_fp8(forward, *args, **kwargs)
        if module not in self._errors:
            error = (forward(*args, **kwargs) - output).float().norm() / output.float().norm()
            inputs = args[0].float()
            peak = inputs.abs().amax() / inputs.square().mean().sqrt()
            self._errors[module] = ModuleError(self.names[module], float(error), float(peak))
        return output
