"""Reinforcement learning of language models in low precision, with learner and sampler provably one policy.

Importing this package loads no torch: each part is imported by its own name, such as `onegrid.formats`.
"""

__version__ = "0.1.0"
