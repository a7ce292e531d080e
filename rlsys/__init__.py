"""RL post-training of Mixture-of-Experts language models: Megatron-Core trainers, SGLang engines, partial
rollouts.
"""
