"""What a run finds on its machine, gathered for `check_machine` before anything expensive is done."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PretrainedConfig

import te_llama
from llm_fp8.config.options import Config
from llm_fp8.config.validation import MachineFacts, ModelFacts, packages_needed
from llm_fp8.distributed.deepspeed_config import load_deepspeed
from llm_fp8.models.build import count_parameters
from llm_fp8.models.lora import require_peft
from llm_fp8.observability.metrics import GIB
from llm_fp8.observability.reporter import require_wandb_login
from llm_fp8.optim.optimizers import bytes_per_parameter
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.host_memory import free_host_bytes
from llm_fp8.utils.packages import TRITON
from llm_fp8.utils.ranks import LaunchRanks
from llm_fp8.utils.te_import import require_te

PROBES: dict[str, Callable[[str], object]] = {
    "transformer_engine": require_te,
    "triton": TRITON.require_installed,
    "peft": require_peft,
    "deepspeed": load_deepspeed,
    "wandb": require_wandb_login,
}
"""Package -> what raises `UserError` where it cannot be used, given the flag that asks for it."""


def gather_facts(
    config: Config,
    hf_config: PretrainedConfig,
    device: torch.device,
    ranks: LaunchRanks,
    plan: PrecisionPlan,
    sharding_mode: str,
) -> MachineFacts:
    """The facts of this process. Imports what the run needs, to see whether it loads."""
    on_gpu = device.type == "cuda"
    problems = {}
    if on_gpu or not config.model.use_te:
        for package, flag in packages_needed(config, device.type, ranks.rank).items():
            try:
                PROBES[package](flag)
            except UserError as error:
                problems[package] = str(error)
                break
    return MachineFacts(
        ranks=ranks,
        sharding_mode=sharding_mode,
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if on_gpu else None,
        compute=plan.compute_name,
        scenario=plan.effective_scenario,
        problems=problems,
        model=model_facts(config, hf_config),
        **_host_facts(config.optim.offload_optimizer, hf_config, ranks),
    )


def _host_facts(share: float, hf_config: PretrainedConfig, ranks: LaunchRanks) -> dict[str, float]:
    if not share:
        return {}
    offloaded = share * count_parameters(hf_config) * bytes_per_parameter("adamw_master").state
    return {
        "offloaded_gib": offloaded * ranks.local_world_size / GIB,
        "free_host_gib": free_host_bytes() / GIB,
    }


def model_facts(config: Config, hf_config: PretrainedConfig) -> ModelFacts | None:
    """The structure of the model, of a TE decoder in detail; None where it is not known, or no TE decoder can have it
    (`check_model` says so).
    """
    if not config.model.use_te:
        num_layers, vocabulary, width = (
            getattr(hf_config, name, None) for name in ("num_hidden_layers", "vocab_size", "hidden_size")
        )
        if num_layers is None or vocabulary is None or width is None:
            return None
        return ModelFacts(num_layers, (vocabulary, width))
    try:
        spec = te_llama.decoder_spec(hf_config)
    except te_llama.UnsupportedArchitecture:
        return None
    return ModelFacts(
        spec.num_layers,
        lm_head=(spec.vocab_size, spec.hidden_size),
        head_dim=spec.head_dim,
        attention_dropout=spec.attention_dropout,
        windows=spec.windows,
        layer_weights=te_llama.layer_weight_shapes(spec),
    )
