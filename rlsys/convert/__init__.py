"""Conversion of models between Hugging Face folders and Megatron-Core, by a name table for each model family."""
