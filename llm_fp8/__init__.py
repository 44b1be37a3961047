"""Fine-tuning of Llama, Qwen and Mistral models in FP8, MXFP8 and BF16: what both training scripts share."""
