"""The command `rlsys`. The only package that imports `launch`."""
