"""Views of a run for people: the dashboard `rlsys dash`, and the text of samples."""
