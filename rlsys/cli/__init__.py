"""Command line `rlsys`. The only package that imports `launch`."""
