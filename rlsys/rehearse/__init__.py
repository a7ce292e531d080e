"""One rank of any layout, at its true size, on one CPU core: the trainer's own code on tensors without values.

kinds         which ranks stand for the others: the first, a middle and the last pipeline stage
world         process groups of any size of which only this rank exists
tensors       which tensors are fake (big, floating) and which are real (counts, routing, splits)
stand_ins     what of megatron-core, torch and the trainer is replaced, guarded against upstream changes
kernels       what the kernels of a GPU keep and cost
memory        bytes alive, by kind; collectives: every call, its group and bytes; meter: both, and FLOPs
rank          one rank's build, scoring pass, update and weight gathering, in a process of its own
figures       what that gives; report: as text
command       `rlsys rehearse`
"""
