"""Observability of a run: metrics (JSON lines, the source of truth), live display, report, spans, diagnosis."""
