"""Forecast of a run on other machines or with other settings, before it is started: `rlsys plan`.

    rates of a machine, or of an own run -> costs of a pass, a train step, a push
    response lengths, a config           -> one simulated run: the rollout's own code, engines that only count
    several settings                     -> a table, and the best of them with the reason

costs             seconds of a forward pass, of prefill, of training, of a push, on a machine (rlsys/core/machines.py)
calibration       the same, measured on an own run
lengths           distribution of response lengths
virtual_time      an event loop in which waiting costs nothing
simulated_engine  SGLang's HTTP API over a continuous batch that is timed, not computed
simulation        the product's rollout manager, router and buffer over such engines, and the trainer's clock
settings          the placements, engine counts and N'/N to try
"""
