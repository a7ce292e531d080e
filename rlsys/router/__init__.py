"""Between a run's samples and its engines: placement, dispatch, interruption, weight updates."""
