"""What a run tells: metrics (the truth, JSON lines), the live display, the report."""
