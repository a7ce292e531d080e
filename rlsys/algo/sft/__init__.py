"""Losses on given answers: cross entropy and its variants, preferences, reward models."""
