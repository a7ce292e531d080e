"""The stand-alone HTTP router, `rlsys router`."""
