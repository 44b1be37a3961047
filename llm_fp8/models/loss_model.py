"""What the loop calls: batch in, summed loss and auxiliary losses out, for both decoders.

The loss is inside the module, so that wrappers (DDP, FSDP) see one forward call per micro-batch and the logits
([tokens, vocabulary], gigabytes) never leave it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from llm_fp8.data.collate import Batch
from llm_fp8.kernels.cross_entropy import linear_cross_entropy_sum
from llm_fp8.models.build import decoder_layers
from llm_fp8.models.experts import router_loss
from llm_fp8.models.weight_shards import is_te_model
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.hf_internals import chosen_attention

ROUTER_LOSS = "router_aux_loss"


class TrainingModel(nn.Module):
    """A causal LM that returns the summed cross entropy of a `Batch`."""

    def __init__(self, model: PreTrainedModel, max_seq_length: int, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.max_seq_length = max_seq_length
        self.compute_dtype = compute_dtype
        self.router_loss, self.router_note = router_loss(model)
        self._router_logits: tuple[Tensor, ...] = ()
        self.uses_te_decoder = is_te_model(decoder_layers(model)[0])
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            kind = type(model).__name__
            raise UserError(f"--model_name {model.config.name_or_path}: {kind} has no linear lm_head without bias.")

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross entropy summed over the supervised tokens of `batch` (fp32 scalar), and auxiliary losses by name.

        An auxiliary loss is a weighted sum over tokens too, so that the training loss is the sum of all of them. There
        is none in evaluation.
        """
        head = self.model.get_output_embeddings().weight
        loss_sum = linear_cross_entropy_sum(self.hidden(batch), head, batch.labels, compute_dtype=self.compute_dtype)
        if self.router_loss is None or not self.training:
            return loss_sum, {}
        logits, self._router_logits = self._router_logits, ()
        return loss_sum, {ROUTER_LOSS: self.router_loss(logits, batch)}

    @property
    def coefficients(self) -> dict[str, float]:
        """Name of each auxiliary loss -> its weight, by which `forward` has multiplied it."""
        return {} if self.router_loss is None else {ROUTER_LOSS: self.router_loss.coefficient}

    def hidden(self, batch: Batch) -> Tensor:
        """The last hidden states, shape of `batch.input_ids` plus [h]."""
        if self.uses_te_decoder:
            return self._te_hidden(batch)
        if batch.cu_seqlens is None:
            return self._decode(batch.input_ids, position_ids=batch.position_ids, attention_mask=batch.attention_mask)
        if chosen_attention(self.model.config) == "flash_attention_2":
            starts = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch.cu_seqlens)
            lengths = dict.fromkeys(("max_length_q", "max_length_k"), batch.max_seqlen)
            return self._decode(batch.input_ids, position_ids=batch.position_ids, **starts, **lengths)
        # Without variable-length attention each sequence gets a mask, which transformers derives from position ids.
        sequences = batch.input_ids.view(-1, self.max_seq_length)
        hidden = self._decode(sequences, position_ids=batch.position_ids.view_as(sequences))
        return hidden.view(*batch.input_ids.shape, -1)

    def _te_hidden(self, batch: Batch) -> Tensor:
        cu_seqlens = batch.cu_seqlens
        if cu_seqlens is None:
            assert batch.attention_mask is not None
            lengths = batch.attention_mask.sum(dim=1, dtype=torch.int32)
            cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        # transformers passes a 4-D mask on unchanged: an empty one keeps it from building a [T, T] mask for nothing.
        no_mask = torch.empty(0, 0, 0, 0, device=batch.input_ids.device)
        return self._decode(
            batch.input_ids, attention_mask=no_mask, cu_seq_lens_q=cu_seqlens, max_length_q=batch.max_seqlen
        )

    def _decode(self, input_ids: Tensor, **arguments: object) -> Tensor:
        output = self.model.base_model(input_ids=input_ids, use_cache=False, **arguments)
        if self.router_loss is not None and self.training:
            self._router_logits = output.router_logits
        return output.last_hidden_state
