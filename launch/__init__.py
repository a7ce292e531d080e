"""Launcher: starts, supervises and stops the processes of a run."""
