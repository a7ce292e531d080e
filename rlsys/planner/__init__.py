"""What a run would do on other machines, or with other settings, before it is started: `rlsys plan`.

    rates of a machine, or of an own run -> costs of a pass, a train step, a push
    response lengths, a config           -> one simulated run: the rollout's own code, engines that only count
    several settings                     -> a table, and the best of them with the reason

costs         seconds of a forward pass, of prefill, of training, of a push, on a machine (rlsys/core/machines.py)
calibration   the same as a run of one's own shows them
lengths       how long responses are
virtual_time  an event loop in which waiting costs nothing
engine        SGLang's HTTP API over a continuous batch that is not computed
simulation    the rollout manager, router and buffer of the product over such engines, and the trainer's clock
settings      which placements, engines and N'/N are tried
command       `rlsys plan`
"""
