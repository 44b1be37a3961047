"""What a run's step computes in which precision, where its time and memory go, and which option helps most.

gemm_operands   operand types of each linear layer's fprop, dgrad and wgrad: recorded, not derived
bottlenecks     one recorded step by kernel class, and from what was measured to the option that acts
memory          bytes of tensors by kind, and how the peak divides
session         builds the run and measures it
static_report   what can be said without a GPU
result          the findings as plain values, and what is wrong in them
render          the findings as tables
"""
