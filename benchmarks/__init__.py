"""Side-by-side timing of marlin-jit and others on one GPU. See README.md beside this."""
