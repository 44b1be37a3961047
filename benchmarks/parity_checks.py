#!/usr/bin/env python
"""How often the parity check refuses a right model, and whether it refuses wrong ones, on pretrained weights.

    python benchmarks/parity_checks.py --model FOLDER --data gsm8k_train.jsonl --checks 200 --output OUT.json

Right models: `FOLDER` (a pretrained Llama with bf16 weights) as it is, with adapters and sharded (FSDP2 on one rank),
and small random models of every family, each on a batch of its own. Wrong models: `FOLDER`, or a variant of it that has
the feature in question, with one planted fault. A variant keeps the pretrained weights; what it adds (biases, q and k
norms) is random.

The result holds the figures that the check judges, for every check, so that its limits can be set against them. The
same command goes on from what --output holds. Needs one GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # the check wants fp32 to be fp32

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig  # noqa: E402

import te_llama  # noqa: E402
from llm_fp8.config.options import LoraConfig, ParallelConfig  # noqa: E402
from llm_fp8.data.collate import Batch  # noqa: E402
from llm_fp8.distributed.fsdp import FsdpStrategy  # noqa: E402
from llm_fp8.models.export import hf_tensors  # noqa: E402
from llm_fp8.models.lora import add_adapters, initialize_adapters_  # noqa: E402
from llm_fp8.models.parity import FP32_LIMIT, LAYER_LIMIT, MEAN_LIMIT, ParityReport, check_weights, compare_layers  # noqa: E402
from llm_fp8.models.weights import fill_te_model  # noqa: E402
from llm_fp8.observability.provenance import collect_provenance  # noqa: E402
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script  # noqa: E402
from llm_fp8.utils.json_files import read_json, require_writable, write_json_atomic  # noqa: E402

SEQ_LENGTH = 1024
DEVICE = "cuda"
LAYER = 5
"""Where a fault of one layer is planted."""
SHARE_OF_SMALL_MODELS = 0.6

LLAMA3_ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512
)
YARN_ROPE = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512)
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3_rope": dict(rope_scaling=LLAMA3_ROPE),
    "yarn": dict(rope_scaling=YARN_ROPE),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "window": dict(model_type="mistral", sliding_window=128),
    "qwen2": dict(model_type="qwen2"),
    "qwen3": dict(model_type="qwen3"),
}
"""Entries of config.json that a variant changes."""
SMALL = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8, head_dim=64)


def variant_config(base: PretrainedConfig, variant: str, small: bool) -> PretrainedConfig:
    """The config of `base` with the entries of a variant; `small`: of a few layers."""
    entries = base.to_dict() | (SMALL | dict(num_key_value_heads=2) if small else {})
    rope = dict(entries.pop("rope_parameters"))
    changes = dict(VARIANTS[variant])
    entries |= dict(rope_parameters={"rope_theta": rope["rope_theta"]} | changes.pop("rope_scaling", {}))
    for name in ("architectures", "model_type", "dtype", "layer_types"):
        entries.pop(name, None)
    return AutoConfig.for_model(changes.pop("model_type", "llama"), **{**entries, **changes})


def write_variant(base: Path, variant: str, small: bool, seed: int, folder: Path) -> Path:
    """A folder with the variant's weights: those of `base` where it has them, else (and all of a small one) random."""
    torch.manual_seed(seed)
    config = variant_config(AutoConfig.from_pretrained(base), variant, small)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    if not small:
        stored = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
        model.load_state_dict(stored, strict=False)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def text_batch(base: Path, data: Path, seed: int, vocab_size: int) -> Batch:
    """A packed row of SEQ_LENGTH tokens: whole texts in an order drawn from `seed`, the last one cut."""
    generator = torch.Generator().manual_seed(seed)
    lines = data.read_text().rstrip("\n").split("\n")
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids: list[int] = []
    positions: list[int] = []
    bounds = [0]
    for index in torch.randperm(len(lines), generator=generator).tolist():
        row = json.loads(lines[index])
        tokens = tokenizer(f"{row['problem']}\n{row['generated_solution']}")["input_ids"] + [tokenizer.eos_token_id]
        tokens = [token % vocab_size for token in tokens[: SEQ_LENGTH - len(ids)]]
        ids += tokens
        positions += range(len(tokens))
        bounds.append(len(ids))
        if len(ids) == SEQ_LENGTH:
            break
    input_ids = torch.tensor([ids], device=DEVICE)
    return Batch(
        input_ids=input_ids,
        labels=input_ids,
        position_ids=torch.tensor([positions], device=DEVICE),
        attention_mask=None,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=DEVICE),
        max_seqlen=SEQ_LENGTH,
        num_tokens=SEQ_LENGTH,
        num_real_tokens=SEQ_LENGTH,
        num_supervised_tokens=SEQ_LENGTH,
        sum_squared_lengths=0,
        row_ids=(),
    )


def build(folder: Path, built_config: PretrainedConfig | None = None, lora: bool = False) -> Any:
    """A TE model in bf16 with the folder's weights; `built_config`: what the decoder is built from in its place."""
    config = AutoConfig.from_pretrained(folder)
    model = te_llama.build_te_model(built_config or config, torch.bfloat16, DEVICE, unfused_mlp=lora)
    fill_te_model(model, [folder / "model.safetensors"])
    model.config = config
    if lora:
        add_adapters(model, LoraConfig(lora_rank=16), torch.float32)
        initialize_adapters_(model, 0)
    return model


# --- planted faults ------------------------------------------------------------------------------------------
# Each is a variant of the model, entries of config.json that the decoder is built from in place of the right ones, and
# what is done to the built model.


def _parameter(model: Any, name: str) -> Tensor:
    """The Hugging Face tensor of layer `LAYER` as a view of the TE model's."""
    spec = te_llama.spec_of(model)
    tensors = te_llama.hf_state_dict(spec, {key: value.data for key, value in te_llama.te_parameters(model).items()})
    return tensors[f"model.layers.{LAYER}.{name}"]


def _exchange(model: Any, first: str, second: str) -> None:
    a, b = _parameter(model, first), _parameter(model, second)
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def _wrap_attention(model: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """`change` the keyword arguments of every layer's attention."""
    for layer in model.model.layers:
        own = layer.attention.forward

        def forward(*tensors: Tensor, own: Any = own, **arguments: Any) -> Tensor:
            change(arguments)
            return own(*tensors, **arguments)

        layer.attention.forward = forward


def _move_boundaries(arguments: dict[str, Any]) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        moved = arguments[name].clone()
        moved[1:-1] += 1
        arguments[name] = moved


def _merge_last_documents(arguments: dict[str, Any]) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        bounds = arguments[name]
        arguments[name] = torch.cat((bounds[:-2], bounds[-1:]))
    arguments["max_seqlen_q"] = arguments["max_seqlen_kv"] = SEQ_LENGTH


def _scale_softmax(model: Any, factor: float, kinds: tuple[str, ...] = ()) -> None:
    for layer in model.model.layers:
        for module in layer.attention.modules():
            if hasattr(module, "softmax_scale") and (not kinds or type(module).__name__ in kinds):
                module.softmax_scale *= factor


def _set_mlp(model: Any, name: str, value: Any) -> None:
    for layer in model.model.layers:
        setattr(layer.mlp, name, value)


def _unrotate_half(model: Any) -> None:
    """Rows of q of one layer in the order of interleaved RoPE."""
    q = _parameter(model, "self_attn.q_proj.weight")
    head = te_llama.spec_of(model).head_dim
    q.copy_(q.unflatten(0, (-1, head // 2, 2)).transpose(1, 2).flatten(0, 2).clone())


def _roll_heads(model: Any) -> None:
    """The query heads of one layer belong to other key heads."""
    q, o = _parameter(model, "self_attn.q_proj.weight"), _parameter(model, "self_attn.o_proj.weight")
    head = te_llama.spec_of(model).head_dim
    q.copy_(q.roll(head, 0).clone())
    o.copy_(o.roll(head, 1).clone())


def _leave_out_qk_norm(model: Any) -> None:
    for layer in model.model.layers:
        layer.q_norm.forward = layer.k_norm.forward = lambda x: x


def _round_angles(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.angles = rotary.angles.bfloat16().float()


def _untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _nudge(model: Any, name: str) -> None:
    _parameter(model, name).view(-1)[7] += 0.01


def _round_to_fp8(model: Any, name: str) -> None:
    weight = _parameter(model, name)
    weight.copy_(weight.to(torch.float8_e4m3fn).to(weight.dtype))


def _nothing(_: Any) -> None: ...


@dataclasses.dataclass(frozen=True)
class Fault:
    """`built_from`: entries of config.json that the decoder is built from; `change` happens to the built model."""

    name: str
    variant: str = "llama"
    built_from: dict[str, Any] = dataclasses.field(default_factory=dict)
    change: Callable[[Any], Any] = _nothing


def faults(theta: float) -> list[Fault]:
    """The planted faults; `theta`: the pretrained model's RoPE base."""
    rope = {"rope_theta": theta}
    q, k, v, o = (f"self_attn.{name}_proj" for name in "qkvo")
    gate, up, down = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    fused = ("FusedAttention", "FlashAttention")

    def zero(name: str) -> Callable[[Any], Any]:
        return lambda model: _parameter(model, name).zero_()

    def exchange(first: str, second: str) -> Callable[[Any], Any]:
        return lambda model: _exchange(model, first, second)

    def attention(change: Callable[[dict[str, Any]], None]) -> Callable[[Any], Any]:
        return lambda model: _wrap_attention(model, change)

    return [
        Fault("RoPE theta 5% larger", built_from=dict(rope_parameters={"rope_theta": 1.05 * theta})),
        Fault("RoPE theta 10,000", built_from=dict(rope_parameters={"rope_theta": 1e4})),
        Fault("RoPE scaling ignored (llama3)", "llama3_rope", dict(rope_parameters=rope)),
        Fault("RoPE scaling factor 4 for 8", "llama3_rope", dict(rope_parameters=rope | LLAMA3_ROPE | {"factor": 4.0})),
        Fault("YaRN's factor ignored", "yarn", dict(rope_parameters=rope | YARN_ROPE | {"attention_factor": 1.0})),
        Fault("RoPE angles rounded to bf16", change=_round_angles),
        Fault("q of one layer in interleaved order", change=_unrotate_half),
        Fault("k bias of one layer dropped", "qwen2", change=zero(f"{k}.bias")),
        Fault("q bias of one layer dropped", "qwen2", change=zero(f"{q}.bias")),
        Fault("o bias of one layer dropped", "biases", change=zero(f"{o}.bias")),
        Fault("gate and up of one layer exchanged", change=exchange(gate, up)),
        Fault("k and v of one layer exchanged", change=exchange(f"{k}.weight", f"{v}.weight")),
        Fault(
            "the norms of one layer exchanged",
            change=exchange("input_layernorm.weight", "post_attention_layernorm.weight"),
        ),
        Fault("query heads of one layer with other key heads", change=_roll_heads),
        Fault("one element of down_proj off by 0.01", change=lambda model: _nudge(model, down)),
        Fault("down_proj of one layer rounded to E4M3", change=lambda model: _round_to_fp8(model, down)),
        Fault("window one longer", "window", dict(sliding_window=129)),
        Fault("window ignored", "window", dict(sliding_window=None)),
        Fault("eps 1e-6 for 1e-5", built_from=dict(rms_norm_eps=1e-6)),
        Fault("q and k norm left out", "qwen3", change=_leave_out_qk_norm),
        Fault("softmax scale 2% larger", change=lambda model: _scale_softmax(model, 1.02)),
        Fault(
            "softmax scale 2% larger in the fused kernels alone",
            change=lambda model: _scale_softmax(model, 1.02, fused),
        ),
        Fault("documents leak by one token", change=attention(_move_boundaries)),
        Fault("last two documents merged", change=attention(_merge_last_documents)),
        Fault("attention not causal", change=attention(lambda entries: entries.update(attn_mask_type="padding"))),
        Fault("GELU in place of SiLU", change=lambda model: _set_mlp(model, "activation", "geglu")),
        Fault("norm weights taken as 1 + w", change=lambda model: _set_mlp(model, "zero_centered_gamma", True)),
        Fault("tied lm_head untied", change=_untie),
    ]


# --- one check -------------------------------------------------------------------------------------------------


def figures(report: ParityReport) -> dict[str, Any]:
    """What the check judges, and the ten largest ratios of single tensors, which it does not."""
    worst, (layer, ratio) = report.worst, report.worst_layer
    single = sorted((math.exp(one.log_ratio) for one in report.comparisons), reverse=True)[:10]
    return {
        "fp32": worst.fp32,
        "fp32_tensor": f"{worst.tensor} of layer {worst.layer}",
        "mean_ratio": report.mean_ratio,
        "layer_ratio": ratio,
        "layer": layer,
        "largest_single_ratios": single,
        "num_tensors": len(report.comparisons),
    }


def shard(model: Any) -> Callable[[Tensor], Tensor]:
    """Shard `model` as --sharding fsdp_full does; returns what unshards a parameter."""
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    strategy = FsdpStrategy("fsdp_full", Accelerator(), ParallelConfig(), torch.bfloat16, hybrid_shard_size=1)
    strategy.shard(model, model.model.layers)
    return strategy.full_tensor


def run_check(
    model: Any,
    batch: Batch,
    files: list[Path] | None,
    full_tensor: Callable[[Tensor], Tensor] = torch.Tensor.detach,
) -> dict[str, Any]:
    """Outcome of a check, with its time and the memory that it took beyond the model's."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    refused = None
    try:
        if files:
            check_weights(model, files, full_tensor)
    except UserError as error:
        refused = str(error)
    report = compare_layers(model, batch, SEQ_LENGTH, torch.bfloat16, full_tensor)
    torch.cuda.synchronize()
    return {
        "refused": refused or report.fault(),
        "wall_s": time.perf_counter() - began,
        "memory_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
        **figures(report),
    }


def right(task: dict[str, Any]) -> dict[str, Any]:
    """A right model; a process of its own pool runs it."""
    base, seed = Path(task["base"]), task["seed"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = base
        if task["small"] or task["variant"] != "llama":
            folder = write_variant(base, task["variant"], task["small"], seed, Path(scratch))
        model = build(folder, lora=task["lora"])
        batch = text_batch(base, Path(task["data"]), seed, model.config.vocab_size)
        full_tensor = shard(model) if task["sharded"] else torch.Tensor.detach
        return task | run_check(model, batch, [folder / "model.safetensors"], full_tensor)


def wrong(task: dict[str, Any]) -> dict[str, Any]:
    """A model with a planted fault: with the checkpoint's files, and (`function`) by the layers' function alone."""
    base = Path(task["base"])
    theta = AutoConfig.from_pretrained(base).rope_parameters["rope_theta"]
    fault = next(fault for fault in faults(theta) if fault.name == task["fault"])
    with tempfile.TemporaryDirectory() as scratch:
        folder = base
        if fault.variant != "llama":
            folder = write_variant(base, fault.variant, False, 0, Path(scratch))
        config = AutoConfig.from_pretrained(folder)
        built = AutoConfig.from_pretrained(folder, **fault.built_from) if fault.built_from else config
        if "rope_parameters" in fault.built_from:
            built.rope_parameters = {"rope_type": "default"} | fault.built_from["rope_parameters"]
        model = build(folder, built)
        with torch.no_grad():
            fault.change(model)
        batch = text_batch(base, Path(task["data"]), task["seed"], model.config.vocab_size)
        whole = run_check(model, batch, [folder / "model.safetensors"])
        return task | whole | {"function": run_check(model, batch, None)}


def alone(architecture: str, base: Path, data: Path) -> dict[str, Any]:
    """A check of a random model with its files, alone on the GPU, and the seconds of the comparison with the files."""
    entries = read_json(ROOT / "llm_fp8" / "models" / "architectures" / f"{architecture}.json")
    config = AutoConfig.for_model(entries.pop("model_type"), **entries)
    model = te_llama.build_te_model(config, torch.bfloat16, DEVICE)
    te_llama.initialize_weights_(model, torch.Generator(DEVICE).manual_seed(0))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        files = []
        for name, tensor in hf_tensors(model, torch.Tensor.detach):
            files.append(Path(scratch) / f"{len(files)}.safetensors")
            save_file({name: tensor.contiguous().cpu()}, files[-1])
        began = time.perf_counter()
        check_weights(model, files)
        weights_s = time.perf_counter() - began
        batch = text_batch(base, data, 0, config.vocab_size)
        return {"architecture": architecture, "weights_s": weights_s, **run_check(model, batch, files)}


def _run(task: dict[str, Any]) -> dict[str, Any]:
    try:
        return wrong(task) if "fault" in task else right(task)
    except Exception as error:
        return task | {"error": f"{type(error).__name__}: {error}"}


def tasks(settings: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Right models in turn: small ones of every family, the pretrained one and its variants; then the faults."""
    shared = {"base": str(settings.model), "data": str(settings.data)}
    num_small = round(SHARE_OF_SMALL_MODELS * settings.checks)
    names = list(VARIANTS)
    for seed in range(settings.checks):
        small = seed < num_small
        # Half of the large checks are the pretrained model as it is.
        variant = names[seed % len(names)] if small or seed % 2 else "llama"
        yield {
            **shared,
            "seed": seed,
            "small": small,
            "variant": variant,
            "lora": seed % 4 == 3,
            "sharded": seed % 4 == 1,
        }
    for fault in faults(1e4):
        yield {**shared, "seed": 0, "fault": fault.name}


def record_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Right and wrong models apart, and what counts over all of them."""
    checks = [result for result in results if "fault" not in result]
    planted = [result for result in results if "fault" in result]
    measured = [result for result in checks if "fp32" in result]
    summary = {
        "limits": {"fp32": FP32_LIMIT, "mean_ratio": MEAN_LIMIT, "layer_ratio": LAYER_LIMIT},
        "num_checks": len(checks),
        "num_sharded": sum(result["sharded"] for result in checks),
        "num_with_adapters": sum(result["lora"] for result in checks),
        "num_refused": sum(result.get("refused") is not None for result in checks),
        "num_errors": sum("error" in result for result in results),
        "num_faults": len(planted),
        "num_faults_refused": sum(result.get("refused") is not None for result in planted),
        **{
            f"largest_{name}": max((result[name] for result in measured), default=None)
            for name in ("fp32", "mean_ratio", "layer_ratio", "wall_s", "memory_gib")
        },
    }
    return {"summary": summary, "checks": checks, "faults": planted}


def main() -> int:
    parser = OneSentenceParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a pretrained Llama, one safetensors file")
    parser.add_argument("--data", type=Path, required=True, help="JSONL file with problem and generated_solution")
    parser.add_argument("--checks", type=int, default=200, help="checks of right models (default %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="processes (default %(default)s)")
    parser.add_argument("--alone", default="Llama-3.1-8B", help="architecture that one check is timed on, by itself")
    parser.add_argument("--output", type=Path, required=True)
    settings = parser.parse_args()
    require_writable("--output", settings.output)
    record = read_json(settings.output) if settings.output.exists() else {"checks": [], "faults": [], "alone": None}
    results: list[dict[str, Any]] = [*record["checks"], *record["faults"]]
    done = {(result["seed"], result.get("fault")) for result in results}
    timed = record["alone"]
    if settings.alone and timed is None:
        timed = alone(settings.alone, settings.model, settings.data)
        torch.cuda.empty_cache()
    provenance = collect_provenance(sys.argv)
    with ProcessPoolExecutor(settings.workers, mp_context=get_context("spawn")) as pool:
        for result in pool.map(_run, [t for t in tasks(settings) if (t["seed"], t.get("fault")) not in done]):
            results.append({name: value for name, value in result.items() if name not in ("base", "data")})
            if len(results) % 20 == 0:  # what is there survives a kill
                write_json_atomic(settings.output, {"provenance": provenance, **record_of(results), "alone": timed})
    record = record_of(results)
    write_json_atomic(settings.output, {"provenance": provenance, **record, "alone": timed})
    print(json.dumps(record["summary"], indent=2))
    return 0


if __name__ == "__main__":
    run_script(main)
