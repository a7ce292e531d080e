"""`rlsys sft`: supervised fine-tuning, preferences and reward models, with the trainer of the RL loop."""
