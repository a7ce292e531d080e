"""Rehearsal of one rank of any layout, at its full size, on one CPU core: the trainer's code on tensors without
values.

    kinds         representative ranks: of the first, a middle and the last pipeline stage
    build         build of the trainer's layers, in a separate process
    world         process groups of any size in which only this rank exists
    tensors       fake tensors (big, floating) and real ones (counts, routing, splits)
    stand_ins     replacements for functions of megatron-core, torch and the trainer, guarded against upstream changes
    kernels       memory and cost of GPU kernels
    memory        live bytes by kind of tensor
    collectives   every collective call, with its group and bytes
    meter         memory, collectives and FLOPs of each part of a step
    routes        synthetic routes of tokens to experts
    rank          rehearsal of one rank, in a separate process
    step          build, scoring pass, update and weight gathering of a rank
    figures       results of a rehearsal
    report        results as text
    trial         build of the trainer's layers in this environment, as a check
"""
