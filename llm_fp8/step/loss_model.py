"""The training model: a module that returns the summed loss and auxiliary losses of a batch, for both decoders.

The loss is computed inside it, so that wrappers (DDP, FSDP) get one call per micro-batch and no gigabytes of logits.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from llm_fp8.config.options import Config
from llm_fp8.data.collate import Batch
from llm_fp8.kernels.cross_entropy import IGNORE_INDEX, cap_, linear_cross_entropy_sum
from llm_fp8.models.experts import experts_per_token
from llm_fp8.models.model import decoder_layers, text_decoder
from llm_fp8.models.source import text_config
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.torch_internals import wrap_forward
from te_llama import TEDecoderLayer

ROUTER_LOSS = "router_aux_loss"

PackedForm = Literal["rows", "line", "varlen"]
"""Form of packed documents for a Hugging Face decoder. "rows" are rows of max_seq_length, with a mask that transformers
derives from position ids. "line" is one row of all tokens with `cu_seq_lens_q` etc. for flash attention and `seq_idx`
for convolutions and recurrences. "varlen" is "line" with the attention of `llm_fp8.mixers.varlen`.
`llm_fp8.settle.probe` chooses the fastest form that separates documents.
"""
_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}  # 1 multiplies the logits, -1 divides them
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")


class TrainingModel(nn.Module):
    """A causal LM whose forward pass returns the summed cross entropy of a `Batch`."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: Config,
        compute_dtype: torch.dtype,
        packed_form: PackedForm | None = "rows",
    ) -> None:
        super().__init__()
        self.model = model
        self._decoder = (text_decoder(model),)  # in a tuple, so that its parameters are not registered twice
        module: Any
        for module in self._decoder[0].modules():
            if "longrope" in str(getattr(module, "rope_type", "")) and "forward" not in vars(module):  # not wrapped yet
                wrap_forward(module, functools.partial(_rope_by_document, module.config.rope_parameters))
        self.max_seq_length = config.data.max_seq_length
        self.compute_dtype = compute_dtype
        self.router_loss, self.router_note = router_loss(model)
        self._router_logits: tuple[Tensor, ...] = ()
        # If some layers are Hugging Face's, they need masks and positions, which TE's layers accept too.
        self.uses_te_decoder = all(isinstance(layer, TEDecoderLayer) for layer in decoder_layers(model))
        self.packed_form = packed_form  # None if batches are not packed
        if packed_form == "varlen":
            from llm_fp8.mixers.varlen import use_varlen_attention

            use_varlen_attention(self._decoder[0])
        config = text_config(model.config)
        factors = (getattr(config, name, None) or 1.0 for name in _SCALES)
        self.logit_scale = math.prod(f**power for f, power in zip(factors, _SCALES.values(), strict=True))
        self.softcap: float | None = next(filter(None, (getattr(config, name, None) for name in _SOFTCAPS)), None)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            kind = type(model).__name__
            raise UserError(f"--model_name {model.config.name_or_path}: {kind} has no linear lm_head without bias.")

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the cross entropy, summed over the supervised tokens of `batch` (fp32 scalar), and auxiliary losses by
        name. An auxiliary loss is a weighted sum over tokens, to be added to the cross entropy. Evaluation has none.
        """
        hidden, head = self._scaled(self.hidden(batch)), self.model.get_output_embeddings().weight
        dtype = self.compute_dtype
        loss_sum = linear_cross_entropy_sum(hidden, head, batch.labels, softcap=self.softcap, compute_dtype=dtype)
        if self.router_loss is None or not self.training:
            return loss_sum, {}
        logits, self._router_logits = self._router_logits, ()
        return loss_sum, {ROUTER_LOSS: self.router_loss(logits, batch)}

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses that `forward` returns, in order."""
        return ("loss", *self.coefficients)

    @property
    def coefficients(self) -> dict[str, float]:
        """Name of an auxiliary loss -> weight by which `forward` multiplies it."""
        return {} if self.router_loss is None else {ROUTER_LOSS: self.router_loss.coefficient}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that the loss is computed from, for the last hidden states `hidden` [..., h]."""
        return cap_(self._scaled(hidden) @ self.model.get_output_embeddings().weight.to(hidden.dtype).t(), self.softcap)

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self.logit_scale == 1 else hidden * self.logit_scale

    def hidden(self, batch: Batch) -> Tensor:
        """Return the last hidden states [*batch.input_ids.shape, h]."""
        if self.uses_te_decoder:
            return self._te_hidden(batch)
        if batch.cu_seqlens is None:
            return self.decode(batch.input_ids, position_ids=batch.position_ids, attention_mask=batch.attention_mask)
        if self.packed_form == "rows":
            sequences = batch.input_ids.view(-1, self.max_seq_length)
            hidden = self.decode(sequences, position_ids=batch.position_ids.view_as(sequences))
            return hidden.view(*batch.input_ids.shape, -1)
        arguments: dict[str, Any] = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch.cu_seqlens)
        arguments |= dict.fromkeys(("max_length_q", "max_length_k"), batch.max_seqlen)
        arguments["seq_idx"] = (batch.position_ids == 0).cumsum(-1, dtype=torch.int32) - 1
        return self.decode(batch.input_ids, position_ids=batch.position_ids, **arguments)

    def _te_hidden(self, batch: Batch) -> Tensor:
        cu_seqlens = batch.cu_seqlens
        if cu_seqlens is None:
            assert batch.attention_mask is not None
            lengths = batch.attention_mask.sum(dim=1, dtype=torch.int32)
            cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        # transformers does not change a 4-D mask. An empty one prevents it from building an unused [T, T] mask.
        no_mask = torch.empty(0, 0, 0, 0, device=batch.input_ids.device)
        return self.decode(
            batch.input_ids, attention_mask=no_mask, cu_seq_lens_q=cu_seqlens, max_length_q=batch.max_seqlen
        )

    def decode(self, input_ids: Tensor, **arguments: object) -> Tensor:
        """Return the last hidden states for `input_ids`. `arguments` are passed to the decoder."""
        output = self._decoder[0](input_ids=input_ids, use_cache=False, **arguments)
        if self.router_loss is not None and self.training:
            self._router_logits = output.router_logits
        return output.last_hidden_state


def _rope_by_document(rope: Any, forward: Any, hidden: Tensor, position_ids: Tensor, layer_type: str = "") -> Any:
    """Return longrope's cos and sin [..., S, d] at `position_ids` [..., S]. Short or long frequencies are chosen by the
    length of each document; transformers would choose by the longest document of a batch. Other RoPE types need no such
    wrapper: they do not depend on the length, if it is at most `te_llama.num_positions`.
    """
    of_type = {"layer_type": layer_type} if layer_type else {}
    limit = (rope[layer_type] if layer_type else rope).get("original_max_position_embeddings", 1)
    document = (position_ids == 0).cumsum(-1)
    last = F.pad(torch.zeros_like(position_ids), (0, 1)).scatter_reduce(-1, document, position_ids, "amax")
    is_long = (last >= limit).gather(-1, document)[..., None]
    short = forward(hidden, position_ids.clamp(max=limit - 1), **of_type)
    long = forward(hidden, F.pad(position_ids, (1, 0), value=limit), **of_type)
    return tuple(torch.where(is_long, b[..., 1:, :], a) for a, b in zip(short, long, strict=True))


@dataclass(frozen=True)
class RouterLoss:
    """Load balancing loss of transformers, but per document as in DeepSeek-V3 (arXiv 2412.19437, equation 17): the
    number of experts times the sum, over experts, of the fraction of tokens routed to the expert times its mean
    probability. If it were computed over a micro-batch, it would depend on how the batch is split.
    """

    coefficient: float
    per_token: int

    def __call__(self, router_logits: Iterable[Tensor], batch: Batch) -> Tensor:
        """Return the sum over documents of coefficient * loss * number of supervised tokens (fp32 scalar).
        `router_logits` are [tokens, experts] for each layer.
        """
        document = (batch.position_ids.flatten() == 0).cumsum(0) - 1
        sums: Any = 0.0  # [2, documents, experts] (padded to tokens): choices, probabilities; over tokens and layers
        for logits in router_logits:
            scores = logits.softmax(-1).float()
            chosen = torch.zeros_like(scores).scatter(-1, scores.topk(self.per_token).indices, 1.0)
            sums = sums + scores.new_zeros(2, *scores.shape).index_add(1, document, torch.stack((chosen, scores)))
        num_rows = (sums[0].sum(-1) / self.per_token).clamp_min(1)  # tokens times layers
        losses = sums.shape[-1] * sums.prod(0).sum(-1) / num_rows**2
        return self.coefficient * (losses[document] * (batch.labels.flatten() != IGNORE_INDEX)).sum()


def router_loss(model: PreTrainedModel) -> tuple[RouterLoss | None, str | None]:
    """Return the auxiliary loss (None unless the config sets `output_router_logits`) and a note to print."""
    decoder = text_config(model.config)
    coefficient = getattr(decoder, "router_aux_loss_coef", None) or 0.0
    function = vars(sys.modules[type(model).__module__]).get("load_balancing_loss_func")
    arguments = list(inspect.signature(function).parameters) if function else []
    if not getattr(decoder, "output_router_logits", False):
        note = f"router_aux_loss_coef {coefficient:g} has no effect, as in transformers"
        return None, f"{note}: the model's config does not set output_router_logits" if coefficient else None
    per_token = experts_per_token(model.config)
    if not coefficient or per_token is None or "top_k" not in arguments[2:3]:  # Doge's loss takes other arguments
        return None, "WARNING: output_router_logits has no effect: transformers has no loss for the model's routers"
    note = f"auxiliary loss of routers: {coefficient:g} times transformers' load balancing loss of each document"
    return RouterLoss(coefficient, per_token), note
