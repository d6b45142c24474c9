"""Trains an EAGLE head on a target's own answers: `neuronserve train-eagle`. Needs torch and transformers."""
