"""Router between samples and engines: placement, dispatch, interruption, weight updates."""
