"""The coordinator, in the rollout process: admission, selection, steps, and the protocol with the trainer."""
