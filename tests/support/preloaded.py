"""What a training and its tests import once, for the server that processes of tests are forked from."""

import gc

# ruff: noqa: F401
import accelerate.commands.launch
import peft
import pytest
import scipy.io
import torch._inductor.compile_fx  # much of what DeepSpeed imports; its own import reads the environment
import torch.distributed.run
import transformers.generation
import transformers.models.llama.modeling_llama
import wandb.apis.public
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import llm_fp8.train.run

get_checkpoint_conversion_mapping("llama")  # of every family, kept: it compiles a thousand patterns
gc.collect()
gc.freeze()  # the forked processes share it, and would copy what their collector looks at
