"""Adapters on one model behind the protocol of Tinker's client, `rlsys tenants`."""
