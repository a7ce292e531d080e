"""`rlsys sft`: supervised fine-tuning, preference optimisation and reward models, with the trainer of the RL loop."""
