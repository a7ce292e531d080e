"""Formats of token files: records of tokens, routed experts, sampling support, teacher log-probs."""
