"""How one training is spread over processes: the choice of a mode, and an engine for each kind of it.

choice.py      --sharding_mode auto -> a mode, with the reason; what cannot go together
engine.py      the seam that the loop sees; one process, and DDP
fsdp.py        FSDP2
deepspeed.py   DeepSpeed's ZeRO stages
context.py     rows shared by several ranks (context parallelism)
profile.py     one recorded step: share of communication, slowest rank
"""
