"""Losses of `rlsys sft` on given answers: cross entropy and its variants, preferences, reward models."""
