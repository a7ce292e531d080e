"""Rehearsal of one rank of any layout, at its full size, on one CPU core: the trainer's code on tensors without
values.

kinds         representative ranks: of the first, a middle and the last pipeline stage
world         process groups of any size in which only this rank exists
tensors       fake tensors (big, floating) and real ones (counts, routing, splits)
stand_ins     replacements for functions of megatron-core, torch and the trainer, guarded against upstream changes
kernels       memory and cost of GPU kernels
memory        live bytes by kind; collectives: every call, its group and bytes; meter: both, and FLOPs
rank          one rank's build, scoring pass, update and weight gathering, in a separate process
figures       results of a rehearsal; report: the results as text
command       `rlsys rehearse`
"""
