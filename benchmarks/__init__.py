"""Side-by-side timing of marlin-jit and others on one GPU. See README.md beside this."""

import os

# What is measured is what the planner chooses, not what this machine was tuned to.
os.environ.setdefault("MARLIN_JIT_TUNED", "0")
