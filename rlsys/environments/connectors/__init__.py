"""Adapters of third-party environments to `Environment`: one file per package, which imports the package lazily."""
