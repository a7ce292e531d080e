"""Rehearsal of one rank of a layout, at full size on one CPU core: runs the trainer's code on tensors without values.

kinds         selection of representative ranks: of the first, a middle and the last pipeline stage
build         build of the trainer's layers, in a separate process
world         process groups of any size in which only this rank exists
tensors       fake tensors (big or floating-point) and real tensors (counts, routing, splits)
stand_ins     replacements for functions of megatron-core, torch and the trainer, guarded against upstream changes
kernels       memory and FLOPs of GPU kernels
memory        live bytes by kind of tensor
collectives   log of collective calls with their groups and bytes
meter         memory, collectives and FLOPs of each phase of a step
routes        synthetic routes of tokens to experts
rank          rehearsal of one rank, in a separate process
step          build, scoring pass, update and weight gathering of a rank
figures       results of a rehearsal
report        results as text
trial         check that the installed packages can build the trainer's layers
"""
