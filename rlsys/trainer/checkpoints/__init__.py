"""Checkpoints in megatron's torch_dist format, and conversion from and to Hugging Face folders."""
