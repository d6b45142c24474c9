"""The backend for Inf2 and Trn1 with the classic library, transformers-neuronx (last shipped with SDK 2.25).

The library keeps one cache line (slot) per sequence, computes every slot in each decode, and compiles all its graphs
at once. What follows from that, trap by trap, is in docs/transformers-neuronx.md.

`capabilities` needs neither torch nor the SDK; `device` needs torch; the SDK is imported by `sdk`, when a model loads.
"""
