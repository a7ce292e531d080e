"""Names and launch scripts of verl and slime, `rlsys import`."""
