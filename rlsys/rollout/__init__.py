"""The coordinator of a run: admits groups, selects them for train steps, and directs weight pushes."""
