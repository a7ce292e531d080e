"""Forecast of a run on other machines or with other settings before its start: `rlsys plan`.

    rates of a machine, or log of a run  -> costs of a pass, a train step, a push
    costs, response lengths, a config    -> forecast from a simulated run
    forecasts of several settings        -> a table, and the best setting with the reason

costs                 seconds of a forward pass, a train step and a push on a machine (rlsys/core/machines.py)
calibration           the same costs, measured on a run
lengths               distribution of response lengths
virtual_time          event loop in which waiting takes no real time
simulated_engine      SGLang's HTTP API over a batch whose passes take time but compute nothing
simulation            the rollout manager, router and buffer of a real run over simulated engines
settings              placements, numbers of engines and N'/N to compare
capacity              number of engines that a trainer needs, without a simulation
memory                memory of trainer and engines
layout                assignment of ranks and engines to nodes and GPUs
layout_search         search for a layout that fits
recommendation        a config for a model and a number of GPUs
model_preflight       checks of the model folder and the layout
unusual_settings      warnings about settings that do not fit the model's size
traffic               data of the rollout processes
weight_update_cost    bytes and seconds of a weight update
duration              duration of a run
"""
