"""Model folders: Hugging Face <-> Megatron-Core, one name table per model family, in both directions."""
