"""`rlsys tenants`: a server on which several tenants train adapters of one model, by the protocol of Tinker."""
