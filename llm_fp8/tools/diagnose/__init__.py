"""What a run's step computes in which precision, where its time and memory go, and which option would mend the largest
loss.

operands        which types each linear layer multiplies in fprop, dgrad and wgrad: recorded, not derived
layers          identical layers as one line
problems        what was asked for and is not so
step_time       one recorded step by kernel class, and the gaps
losses          rules from what was measured to the option that acts
memory_kinds    bytes of tensors, and how the peak divides
memory_probe    the hooks that measure it
workload        full rows of random tokens in the form that the configuration asks for
session         builds the parts of a run and measures them
without_gpu     what can be said on a machine without a GPU
result          the findings as plain values
render          the findings as tables
"""
